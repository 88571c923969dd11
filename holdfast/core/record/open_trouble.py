"""What a job waits for and what its open incident is, from the journal alone: a person's answer, a hold, or nodes."""

import msgspec

from holdfast.core.incident.incident_text import ASKS
from holdfast.core.incident.open_incident import Incident, open_incident
from holdfast.model.action import Launch
from holdfast.model.decider_events import Order, Progress, Ready
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry

_ANSWERS = ("resume", "approve")
_GOING = (Phase.LAUNCHING, Phase.STARTING, Phase.TRAINING, Phase.ENDING, Phase.DONE)  # in which nobody is asked


class OpenIncident(msgspec.Struct, frozen=True, kw_only=True):
    """An incident that has no record yet, because no step was made since."""

    number: int
    alarm_at: float
    cause: str  # so far, and with its step
    why: str = ""  # the newest verdict and what it led to; "": it is not judged yet
    failures: int = 1


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What keeps a job from training now, if anything does."""

    asking: str = ""  # what a person is asked; "": nothing
    held: str = ""  # who holds the job; "": nobody does
    waits: str = ""  # for what a job without ranks waits, if for no person
    incident: OpenIncident | None = None


class StandingFold:
    """Takes journal entries one by one; `standing` is how the job stands after the newest."""

    def __init__(self) -> None:
        self._asking, self._held, self._waits, self._why = "", "", "", ""
        self._incident: Incident | None = None
        self._untold = ""  # the cause of an incident that no alarm opened
        self._phase = Phase.NEW
        self._generation, self._closed = 0, 0
        self._progress: Progress | None = None
        self._hosts: dict[str, str] = {}

    @property
    def standing(self) -> Standing:
        return Standing(asking=self._asking, held=self._held, waits=self._waits, incident=self._tell_incident())

    @property
    def asks_only(self) -> bool:
        """Return whether the job stands because it asks, and not because a person holds it."""
        return bool(self._asking) and not self._held

    def add(self, entry: Entry) -> None:
        event, decision = entry.event, entry.decision
        before, self._phase = self._phase, decision.phase
        match event:
            case Ready(node=node, host=host):
                self._hosts[node] = host
            case Progress(generation=generation) if generation == self._generation:
                self._progress = event
                if self._incident is not None and decision.phase is not Phase.TRAINING:
                    self._incident.on_late_step(event)
            case Order(verb="hold", who=who):
                self._held = who
            case Order(verb=verb) if verb in _ANSWERS:
                self._held = self._asking = ""
        self._watch_incident(entry, before)
        if decision.reason.startswith(ASKS):
            self._asking = decision.reason.removeprefix(ASKS)
        if decision.phase in _GOING:
            self._asking = ""
        if decision.phase is not Phase.WAITING:
            self._waits = ""
        elif decision.reason:
            self._waits = strip_number(decision.reason)
        for action in decision.actions:
            if isinstance(action, Launch):
                self._generation, self._progress = action.generation, None
        if decision.closed:
            self._incident, self._closed, self._why = None, decision.closed.number, ""

    def _watch_incident(self, entry: Entry, before: Phase) -> None:
        """Open an incident or its next round, add alarms to it, and name its cause when ranks have stopped."""
        event, decision = entry.event, entry.decision
        heard = event if isinstance(event, Alarm) and event.stance is Stance.ACT else None
        if decision.phase is Phase.STOPPING:
            if before is not Phase.STOPPING:
                self._open_round(entry, heard)
            elif heard is not None and self._incident is not None and self._incident.alarms and self._concerns(heard):
                self._incident.on_more(entry.at, heard)
        elif self._incident is not None and decision.phase is not before:
            if before is Phase.STOPPING and self._incident.alarms:
                self._incident.hosts = self._hosts
                self._incident.name_cause()
            self._why = strip_number(decision.reason) or self._why

    def _open_round(self, entry: Entry, heard: Alarm | None) -> None:
        if self._incident is not None:
            self._incident.next_round(entry.at)
        else:
            good = heard or Alarm(kind=Kind.CRASH, at=entry.at, suspects=(), reason="")
            self._incident = open_incident(entry.at, self._closed + 1, self._generation, self._progress, good)
        self._untold, self._why = "" if heard else strip_number(entry.decision.reason), ""
        if heard is not None:
            self._incident.add_alarm(heard)

    def _concerns(self, alarm: Alarm) -> bool:
        return alarm.kind is Kind.SILENCE or alarm.hard or alarm.generation == self._generation

    def _tell_incident(self) -> OpenIncident | None:
        incident = self._incident
        if incident is None:
            return None
        cause = incident.describe_so_far() if incident.alarms else self._untold
        why = self._why
        if self._asking:
            told = self._asking.removeprefix(f"{incident.cause_text}; ") if incident.alarms else self._asking
            why = f"{told}: a person is asked" if told else why
        return OpenIncident(
            number=incident.number, alarm_at=incident.opened_at, cause=cause, why=why, failures=incident.failures
        )


def strip_number(reason: str) -> str:
    """Return a decision's reason without the "incident 3: " that it begins with."""
    head, colon, rest = reason.partition(": ")
    return rest if colon and head.removeprefix("incident ").isdigit() else reason
