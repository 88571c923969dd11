"""The rung for failures that need another setting or another file: who is told, and when nobody is probed."""

import msgspec

from holdfast.core.incident.ladder import GAVE_UP, find_verdict
from holdfast.model.detector_alarm import Alarm
from holdfast.model.incident_record import Remedy, Verdict
from tests.core.diagnose.test_ladder import OOM, case, past


def test_another_setting_is_asked_for_after_one_more_try() -> None:
    assert find_verdict(case(OOM)).remedy is Remedy.RESTART
    again = find_verdict(case(OOM, past=past(50, at=90.0)))
    assert (again.remedy, again.code) == (Remedy.GIVE_UP, GAVE_UP)
    assert find_verdict(case(OOM, past=past(40, at=90.0))).remedy is Remedy.RESTART  # it got further
    by_code = msgspec.structs.replace(OOM, confidence=0.6)  # an exit code alone asks for nothing
    assert find_verdict(case(by_code, past=past(50, at=90.0))).remedy is Remedy.EVICT


def test_a_file_that_is_named_twice_in_the_same_words_costs_no_probe_and_no_node() -> None:
    words = "exited with code 1 (RuntimeError: cannot decode image 77.jpg)"
    data = msgspec.structs.replace(
        OOM, klass="data_corrupt", group="data_storage", confidence=0.58, hint="Skip it.", reason=words
    )

    def again(cause: Alarm, reason: str) -> Verdict:
        before = tuple(msgspec.structs.replace(p, reason=reason) for p in past(50, at=90.0))
        return find_verdict(case(cause, past=before, may_probe=True, replaceable=False, trained_s=1.0, lost_s=90.0))

    assert find_verdict(case(data, may_probe=True)).remedy is Remedy.RESTART
    verdict = again(data, words)
    assert (verdict.remedy, verdict.code) == (Remedy.GIVE_UP, GAVE_UP) and verdict.reason.endswith("; skip it")
    assert again(data, words.replace("77", "78")).remedy is Remedy.PROBE, "other files: it may be the machine"
    machine = msgspec.structs.replace(data, klass="nccl_init_config", group="infrastructure")
    assert again(machine, words).remedy is Remedy.PROBE


def test_the_last_word_on_a_guess_has_its_advice() -> None:
    guess = msgspec.structs.replace(OOM, confidence=0.58, hint="Use less.")
    stuck = find_verdict(case(guess, past=past(50, 50, 50, at=90.0), replaceable=False))
    assert stuck.reason == "the same failure 4 times without progress; use less"


def test_a_job_that_gets_further_goes_on_while_somebody_is_told_what_to_set() -> None:
    disk = msgspec.structs.replace(OOM, klass="disk_full", hint="Make room.")
    often = past(10, 20, 30, 40)
    verdict = find_verdict(case(disk, past=often, trained_s=900.0, lost_s=100.0))
    assert verdict.remedy is Remedy.RESTART and verdict.reason.endswith(" (make room)")
    stuck = find_verdict(case(disk, past=often, trained_s=9.0, lost_s=100.0))
    assert stuck.remedy is Remedy.GIVE_UP and stuck.reason.endswith("; make room")
    dear = find_verdict(case(disk, past=often, trained_s=150.0, lost_s=100.0))
    assert dear.remedy is Remedy.GIVE_UP, "more often than not it stands"
    unknown = past(10, 20, 30, counted=True)  # where a launch begins anew, nobody knows whether it gets further
    assert find_verdict(case(disk, past=unknown, counted=True, trained_s=900.0, lost_s=100.0)).remedy is Remedy.GIVE_UP
