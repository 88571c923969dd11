"""Which failures to ask an opinion on, and how often."""

from collections import deque

import msgspec

from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.incident_record import Record, Remedy, Verdict
from holdfast.model.journal_entry import Entry

MOST, WITHIN_S = 6, 3600.0  # questions: a job that fails more often than that is not helped by more of them
_MUTE = (-9, -15)  # SIGKILL and SIGTERM leave no last words to have an opinion on


class JudgedIncident(msgspec.Struct, frozen=True, kw_only=True):
    """The open incident, once it has a verdict."""

    number: int
    cause: Alarm
    verdict: Verdict


class FailureOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was done about an incident, and whether training went on."""

    incident: int
    text: str


class FailureQuestions:
    """Picks from the journal the incidents to ask about, each once and only a few an hour, and tells how they ended.

    A language model is asked where the rules are less sure than `below`. If there are past failures, incidents are
    always compared with them, because a person may have said that the rules are wrong.
    """

    def __init__(self, *, below: float, has_model: bool) -> None:
        self._below = below
        self._has_model = has_model
        self._judged = 0  # the newest incident with a verdict
        self._asked = 0  # the newest that was asked about
        self._asked_at: deque[float] = deque(maxlen=MOST)

    def on_entry(
        self, entry: Entry, judged: JudgedIncident | None, *, has_past: bool
    ) -> JudgedIncident | FailureOutcome | None:
        """Return the open incident (`judged`) if an opinion on it is wanted. Return how the incident ended if this
        entry closes the one that was last asked about. Otherwise return None."""
        closed = entry.decision.closed
        if closed and closed.number == self._asked:
            return FailureOutcome(incident=closed.number, text=_describe_outcome(closed))
        if judged is None or judged.number == self._judged:
            return None
        self._judged = judged.number
        if not self._is_wanted(judged.cause, has_past) or self._is_too_often(entry.at):
            return None
        self._asked = judged.number
        self._asked_at.append(entry.at)
        return judged

    def _is_wanted(self, cause: Alarm, has_past: bool) -> bool:
        has_words = cause.kind is Kind.CRASH and cause.code is not None and cause.code not in _MUTE
        return has_words and (has_past or (self._has_model and cause.confidence < self._below))

    def _is_too_often(self, now: float) -> bool:
        return len(self._asked_at) == MOST and now < self._asked_at[0] + WITHIN_S


def _describe_outcome(record: Record) -> str:
    if record.verdict.remedy is Remedy.GIVE_UP:
        return "the job gave up"
    again = f" after {record.failures} failures" if record.failures > 1 else ""
    return f"{record.verdict.remedy}, and training went on{again}"
