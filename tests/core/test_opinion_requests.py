"""Which incidents are worth a question: those with last words that the rules are unsure of, and not too many."""

from holdfast.core.record.opinion_requests import MOST, WITHIN_S, FailureOutcome, FailureQuestions, JudgedIncident
from holdfast.model.decider_events import Tick
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.incident_record import Record, Remedy, Verdict
from holdfast.model.journal_entry import Decision, Entry

RESTART = Verdict(remedy=Remedy.RESTART, reason="once")


def judged(number: int, **more: object) -> JudgedIncident:
    fields = {"kind": Kind.CRASH, "at": 1.0, "suspects": ("n0",), "reason": "exited with code 1", "code": 1} | more
    return JudgedIncident(number=number, cause=Alarm(**fields), verdict=RESTART)  # type: ignore[arg-type]


def entry(at: float = 1.0, closed: Record | None = None) -> Entry:
    return Entry(seq=1, at=at, event=Tick(), decision=Decision(closed=closed))


def ask(
    questions: FailureQuestions, told: Entry, incident: JudgedIncident | None, has_past: bool = False
) -> JudgedIncident | FailureOutcome | None:
    return questions.on_entry(told, incident, has_past=has_past)


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
    questions = FailureQuestions(below=0.6, has_model=True)
    assert ask(questions, entry(), None) is None
    assert ask(questions, entry(), judged(1)) == judged(1)
    assert ask(questions, entry(), judged(1)) is None
    assert ask(questions, entry(), judged(2, confidence=0.59)) == judged(2, confidence=0.59)


def test_what_the_rules_know_or_nobody_can_know_is_not_asked() -> None:
    questions = FailureQuestions(below=0.6, has_model=True)
    known: tuple[dict[str, object], ...]
    known = ({"confidence": 0.6}, {"code": -9}, {"code": -15}, {"code": None}, {"kind": Kind.HANG})
    for number, more in enumerate(known, 1):
        assert ask(questions, entry(), judged(number, **more)) is None


def test_past_failures_are_compared_even_where_the_rules_are_sure() -> None:
    alone = FailureQuestions(below=0.6, has_model=False)
    assert ask(alone, entry(), judged(1)) is None
    assert ask(alone, entry(), judged(2), has_past=True) == judged(2)
    sure = judged(3, confidence=0.9)
    assert ask(alone, entry(), sure, has_past=True) == sure
    assert ask(alone, entry(), judged(4, code=-9), has_past=True) is None


def test_not_too_often() -> None:
    questions = FailureQuestions(below=0.6, has_model=True)
    asked = [ask(questions, entry(at=float(number)), judged(number)) for number in range(1, 20)]
    assert sum(one is not None for one in asked) == MOST
    assert ask(questions, entry(at=WITHIN_S + 0.9), judged(20)) is None
    assert ask(questions, entry(at=WITHIN_S + 1.0), judged(21)) is not None


def test_the_end_of_an_incident_that_was_asked_about_is_noted() -> None:
    questions = FailureQuestions(below=0.6, has_model=True)
    ask(questions, entry(), judged(1))
    found = ask(questions, entry(closed=record(1, failures=3)), None)
    assert found == FailureOutcome(incident=1, text="restart, and training went on after 3 failures")
    assert ask(questions, entry(closed=record(2)), None) is None
    ask(questions, entry(), judged(3))
    gave_up = ask(questions, entry(closed=record(3, remedy=Remedy.GIVE_UP)), None)
    assert gave_up == FailureOutcome(incident=3, text="the job gave up")
