"""What is said of an incident in which the job failed several times, and what its cost is booked as."""

import msgspec

from holdfast.core.incident.failure_sequence import describe_all_failures, join_labels
from holdfast.core.incident.open_incident import Incident
from holdfast.core.record.job_account import TimeUse
from holdfast.core.record.lost_time_bill import Bill
from holdfast.core.record.page_rows import show_incident
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.incident_record import Record, Remedy, Verdict

RESTART = Verdict(remedy=Remedy.RESTART, reason="no node is to blame: restarted in place")


def killed(at: float, rank: int, code: int = -9) -> Alarm:
    reason, name = f"was killed by signal {-code}", f"exit {code}"
    return Alarm(
        kind=Kind.CRASH, at=at, suspects=(f"n{rank}",), ranks=(rank,), code=code, reason=reason, signature=name
    )


def silence(at: float, node: str) -> Alarm:
    reason = "has been silent for 3 s"
    return Alarm(kind=Kind.SILENCE, at=at, suspects=(node,), reason=reason, klass="node_failure", signature="silence")


def record_of(*rounds: tuple[Alarm, ...]) -> Record:
    case = Incident(number=1, generation=1, opened_at=10.0, good_step=5, good_at=9.0, counted=False)
    for number, alarms in enumerate(rounds):
        if number:
            case.next_round(alarms[0].at)
        for alarm in alarms:
            case.add_alarm(alarm)
        case.name_cause()
        case.stopped_at = alarms[-1].at + 1.0
    return case.make_record(RESTART, 99.0, 5)


def test_one_failure_is_told_as_ever() -> None:
    record = record_of((killed(10.0, 2),))
    assert describe_all_failures(record, " at step 5") == "rank 2 on n2 was killed by signal 9 at step 5"
    assert record.label == "SIGKILL of unknown sender"


def test_every_failure_of_an_incident_is_told_and_has_its_part_of_the_name() -> None:
    record = record_of((killed(10.0, 2),), (silence(20.0, "n0"),))
    told = describe_all_failures(record, " at step 5")
    assert told == "2 failures: rank 2 on n2 was killed by signal 9 at step 5; then n0 has been silent for 3 s"
    assert record.label == "2 failures: SIGKILL of unknown sender and node failure"
    row = {TimeUse.DETECT: 3.0, TimeUse.REDO: 1.0}
    shown = show_incident(record, Bill(incidents={1: row}, changes={}, others={}, causes={}))
    assert shown.label == record.label and shown.lost_s == 4.0, "what all of them cost"
    assert shown.cause == describe_all_failures(record)


def test_failures_that_are_the_same_are_counted() -> None:
    twice = record_of((killed(10.0, 2),), (killed(20.0, 2),))
    assert describe_all_failures(twice) == "rank 2 on n2 was killed by signal 9, 2 times without a step in between"
    assert twice.label == "SIGKILL of unknown sender"
    thrice = record_of((silence(10.0, "n0"),), (killed(20.0, 2),), (killed(30.0, 2),))
    assert describe_all_failures(thrice) == (
        "3 failures: n0 has been silent for 3 s; then rank 2 on n2 was killed by signal 9 (2 times)"
    )


def test_of_very_many_failures_the_first_and_the_last_are_told() -> None:
    record = record_of(*((killed(10.0 * n, n, code=-n),) for n in range(1, 80)))
    told = describe_all_failures(record)
    assert told.startswith("79 failures: rank 1 on n1 was killed by signal 1; then rank 2 on n2")
    assert told.endswith("others; then rank 79 on n79 was killed by signal 79") and told.count("; then ") == 4
    assert len(record.causes) == 64


def test_causes_of_one_failure_share_its_name() -> None:
    record = record_of((killed(10.0, 2), killed(10.05, 3, code=-11)))
    assert record.label == "SIGKILL of unknown sender and killed by SIGSEGV" and record.failures == 1
    assert describe_all_failures(record) == record.cause


def test_a_name_is_as_certain_as_the_least_certain_cause() -> None:
    joined = join_labels(["CUDA error (70% sure)", "node failure"], 2)
    assert joined == "2 failures: CUDA error and node failure (70% sure)"
    assert join_labels(["CUDA error (70% sure)", "CUDA error"], 2) == "CUDA error (70% sure)"


def test_older_journals_name_the_first_failure_and_the_last() -> None:
    record = record_of((silence(10.0, "n0"),), (killed(20.0, 2),))
    record = msgspec.structs.replace(record, causes=(), last_cause="it fell")
    assert describe_all_failures(record) == "2 failures: n0 has been silent for 3 s; then it fell"
