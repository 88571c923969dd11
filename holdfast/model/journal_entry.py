"""One line of the journal: an event that the decider took in, and the decision that it returned."""

import msgspec

from holdfast.model.action import Action
from holdfast.model.decider_events import Event
from holdfast.model.incident_record import Change, Record
from holdfast.model.job_phase import Phase


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    actions: tuple[Action, ...] = ()
    wake_at: float | None = None
    reason: str = ""
    phase: Phase = Phase.NEW
    closed: Record | None = None
    changed: Change | None = None
    stood_since: float | None = None  # of a job that makes steps again, though nobody did anything about it


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the journal."""

    seq: int
    at: float
    event: Event
    decision: Decision
