"""Which incidents are worth a question: those with last words that the rules are unsure of, and not too many."""

from holdfast.core.record.unsure_failures import MOST, WITHIN_S, FailureOutcome, JudgedIncident, UnsureFailures
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.event import Decision, Entry, Tick
from holdfast.model.incident_record import Record, Remedy, Verdict

RESTART = Verdict(remedy=Remedy.RESTART, reason="once")


def judged(number: int, **more: object) -> JudgedIncident:
    fields = {"kind": Kind.CRASH, "at": 1.0, "suspects": ("n0",), "reason": "exited with code 1", "code": 1} | more
    return JudgedIncident(number=number, cause=Alarm(**fields), verdict=RESTART)  # type: ignore[arg-type]


def entry(at: float = 1.0, closed: Record | None = None) -> Entry:
    return Entry(seq=1, at=at, event=Tick(), decision=Decision(closed=closed))


def record(number: int, remedy: Remedy = Remedy.RESTART, failures: int = 1) -> Record:
    return Record(
        number=number,
        generation=1,
        cause="it failed",
        kind="crash",
        klass="",
        verdict=Verdict(remedy=remedy, reason=""),
        good_step=1,
        good_at=0.0,
        alarm_at=1.0,
        stopped_at=2.0,
        launched_at=3.0,
        resumed_at=4.0,
        resumed_from=1,
        failures=failures,
    )


def test_an_incident_is_asked_about_once() -> None:
    unsure = UnsureFailures(below=0.6)
    assert unsure.on_entry(entry(), None) is None
    assert unsure.on_entry(entry(), judged(1)) == judged(1)
    assert unsure.on_entry(entry(), judged(1)) is None
    assert unsure.on_entry(entry(), judged(2, confidence=0.59)) == judged(2, confidence=0.59)


def test_what_the_rules_know_or_nobody_can_know_is_not_asked() -> None:
    unsure = UnsureFailures(below=0.6)
    known: tuple[dict[str, object], ...]
    known = ({"confidence": 0.6}, {"code": -9}, {"code": -15}, {"code": None}, {"kind": Kind.HANG})
    for number, more in enumerate(known, 1):
        assert unsure.on_entry(entry(), judged(number, **more)) is None


def test_not_too_often() -> None:
    unsure = UnsureFailures(below=0.6)
    asked = [unsure.on_entry(entry(at=float(number)), judged(number)) for number in range(1, 20)]
    assert sum(one is not None for one in asked) == MOST
    assert unsure.on_entry(entry(at=WITHIN_S + 0.9), judged(20)) is None
    assert unsure.on_entry(entry(at=WITHIN_S + 1.0), judged(21)) is not None


def test_the_end_of_an_incident_that_was_asked_about_is_noted() -> None:
    unsure = UnsureFailures(below=0.6)
    unsure.on_entry(entry(), judged(1))
    found = unsure.on_entry(entry(closed=record(1, failures=3)), None)
    assert found == FailureOutcome(incident=1, text="restart, and training went on after 3 failures")
    assert unsure.on_entry(entry(closed=record(2)), None) is None
    unsure.on_entry(entry(), judged(3))
    gave_up = unsure.on_entry(entry(closed=record(3, remedy=Remedy.GIVE_UP)), None)
    assert gave_up == FailureOutcome(incident=3, text="the job gave up")
