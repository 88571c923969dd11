"""Links that several machines have lost together: no node is blamed, and the job waits for a bounded time."""

from holdfast.core.decide import incident_course, launching
from holdfast.core.decide.job_state import JobState
from holdfast.model.action import Say
from holdfast.model.decider_events import LinksDown, LinksUp
from holdfast.model.detector_alarm import Alarm
from holdfast.model.job_phase import Phase


def on_links_lost(state: JobState, now: float, alarm: Alarm) -> str:
    """Record which links are down, so that the next launch waits for them. Stop the job if ranks need them."""
    seated = state.nodes.active.intersection(alarm.suspects)
    state.nodes.links.begin_wait(now, (*seated, *state.nodes.standbys.beside_job(alarm.suspects)), state.limits.wait_s)
    used = seated - state.nodes.ended  # standbys without links are no cause of what happens to ranks
    if state.phase in (Phase.LAUNCHING, Phase.STARTING, Phase.TRAINING) and used:
        return incident_course.open_trouble(state, now, alarm)
    if state.phase is Phase.STOPPING and used:
        state.current_incident.add_alarm(alarm)
        return f"incident {state.current_incident.number}: noted while stopping: {alarm.reason}"
    state.emit(Say(text=alarm.reason))
    return f"{alarm.reason}; {launching.launch_or_wait(state, now)}" if state.phase is Phase.WAITING else alarm.reason


def on_links_down(state: JobState, event: LinksDown) -> str:
    """Remember nodes that have a link down, so that no launch admits them. Seated nodes go on until an alarm comes.
    Return text about the links; "" if nothing new is down."""
    return f"a link of {', '.join(lost)} is down" if (lost := state.nodes.links.on_lost(event.nodes)) else ""


def on_links_up(state: JobState, now: float, event: LinksUp) -> str:
    back = state.nodes.links.on_back(now, event.nodes)
    if not back:
        return ""
    reason = f"{', '.join(back)} {'has its link' if len(back) == 1 else 'have their links'} back"
    return f"{reason}; {launching.launch_or_wait(state, now)}" if state.phase is Phase.WAITING else reason
