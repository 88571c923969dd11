"""The benchmark of recovery: where time goes, and who is ahead."""

import pytest

from benchmarks import ckpt, recovery
from benchmarks.recovery import CASES, OURS, Round, Trial, judge, phases, shown
from holdfast.model.incident_record import Record, Remedy, Verdict


def record(**changed: float) -> Record:
    told = {"good_at": 99.0, "alarm_at": 101.0, "stopped_at": 103.0, "launched_at": 106.0, "resumed_at": 110.0}
    verdict = Verdict(remedy=Remedy.RESTART, reason="it was the first time")
    return Record(
        number=1,
        generation=1,
        cause="rank 2 on a was killed by SIGKILL",
        kind="crash",
        klass="",
        verdict=verdict,
        good_step=7,
        resumed_from=7,
        **{**told, **changed},  # type: ignore[arg-type]
    )


def test_phases_add_up_from_the_fault_to_the_first_step() -> None:
    assert phases(record(), 100.0) == {"detect": 1.0, "stop": 2.0, "launch": 3.0, "first step": 4.0}
    told = phases(record(probed_s=1.0, grouped_at=107.0, restored_at=107.5), 100.0)
    assert list(told) == ["detect", "stop", "probe", "launch", "groups", "restore", "first step"]
    assert told["probe"] == 1.0
    assert told["launch"] == 2.0
    assert sum(told.values()) == 10.0


def rounds(theirs: float | None, ours: float | None) -> dict[str, list[Round]]:
    return {
        "torchrun": [Round([Trial(case=case, seconds=theirs) for case in CASES])],
        "dlrover-run": [Round([Trial(case="exception", seconds=None)])],
        OURS: [Round([Trial(case=case, seconds=ours, phases={"detect": 0.1}) for case in CASES])],
    }


def test_who_is_back_sooner_is_ahead_and_who_never_is_comes_last() -> None:
    assert all(judge(rounds(8.0, 0.3), {}).goals.values())
    assert all(judge(rounds(None, 0.3), {}).goals.values())
    assert not any(judge(rounds(0.2, 0.3), {}).goals.values())
    assert not any(judge(rounds(8.0, None), {}).goals.values())
    assert not any(judge(rounds(None, None), {}).goals.values())


def test_a_launcher_that_did_not_run_is_named() -> None:
    played = {**rounds(8.0, 0.3), "ft_launcher": [Round(failed="it never came to step 10")]}
    findings = judge(played, {"other": "not here"})
    assert findings.skipped == {"other": "not here", "ft_launcher": "it never came to step 10"}
    assert len(findings.goals) == len(CASES)
    assert shown(played).row_count == len(CASES)


def test_what_is_asked_for_and_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert (recovery.main(["slurmrun"]), ckpt.main(["peer", "stall"])) == (2, 2)
    launcher, part = capsys.readouterr().err.splitlines()
    assert launcher.startswith("bench-recovery: there is no launcher slurmrun here; there are ")
    assert part == f"bench-ckpt: there is no part stall; there are {', '.join(ckpt.PARTS)}"
