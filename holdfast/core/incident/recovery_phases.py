"""The phases of an incident whose ranks came to no step: what each launch, pause and wait of it took."""

from typing import Protocol

from holdfast.core.incident import incident_text
from holdfast.model.job_phase import Phase


class RoundTimes(Protocol):
    """The times of an open incident's present round, and the phases of earlier ones; `open_incident.Incident`."""

    opened_at: float
    again_at: float
    earlier_s: dict[str, float]
    is_pausing: bool
    stopped_at: float
    silent_at: float
    probed_s: float
    asked_s: float
    held_s: float
    ordered_at: float
    launched_at: float

    def on_answer(self, now: float, *, held: bool) -> None: ...


def book_phases(incident: RoundTimes, now: float, last: str) -> None:
    """Add the time since the last failure, or the last pause, to `earlier_s`; `last` is the phase after the launch."""
    if incident.is_pausing:
        end_pause(incident, now)
    probed_at = incident.stopped_at + incident.probed_s
    asked_at = probed_at + incident.asked_s
    probed = {"probe": probed_at} if incident.probed_s > incident_text.SHOWN_S else {}
    stood = {"ask": asked_at} if incident.asked_s else {}
    stood |= {"hold": asked_at + incident.held_s} if incident.held_s else {}
    ends = {"silence": incident.silent_at, "stop": incident.stopped_at, **probed, **stood}
    ends |= {"wait": incident.ordered_at or now, "launch": incident.launched_at or now, last: now}
    at = incident.again_at or incident.opened_at
    for name, end_at in ends.items():
        end_at = min(max(end_at, at), now)
        if end_at > at:
            incident.earlier_s = incident.earlier_s | {name: incident.earlier_s.get(name, 0.0) + end_at - at}
            at = end_at
    incident.again_at, incident.probed_s = now, 0.0
    incident.asked_s, incident.held_s = 0.0, 0.0
    incident.silent_at, incident.ordered_at, incident.launched_at = 0.0, 0.0, 0.0


def begin_pause(incident: RoundTimes, now: float) -> None:
    """Record that ranks are ended on purpose before their first step, and launched again."""
    book_phases(incident, now, incident_text.BROKEN_OFF)
    incident.stopped_at, incident.is_pausing = 0.0, True


def end_pause(incident: RoundTimes, now: float) -> None:
    paused_s = incident.earlier_s.get("pause", 0.0) + now - incident.again_at
    incident.earlier_s = incident.earlier_s | {"pause": paused_s}
    incident.again_at, incident.stopped_at, incident.is_pausing = now, now, False


def end_given_up(incident: RoundTimes, now: float, phase: Phase, *, held: bool) -> None:
    """Record that the phase in which the job is now was the last one of this incident."""
    if phase is Phase.HELD:
        incident.on_answer(now, held=held)
    if incident.is_pausing:
        end_pause(incident, now)
    incident.probed_s = now - incident.stopped_at if phase is Phase.PROBING else incident.probed_s
    incident.stopped_at, incident.ordered_at = incident.stopped_at or now, incident.ordered_at or now
    incident.launched_at = incident.launched_at or now
