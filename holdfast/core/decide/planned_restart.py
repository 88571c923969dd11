"""Planned restarts: for a new release, for an order from a person, or to grow the job."""

from holdfast.core.decide import incident_course, launching
from holdfast.core.decide.job_state import JobState
from holdfast.core.decide.ongoing_planned_restart import Pause
from holdfast.core.decide.surviving_ranks import add_hand_over, can_grow, can_hand_over, make_parking
from holdfast.core.incident import recovery_phases
from holdfast.core.incident.open_incident import Incident
from holdfast.model.decider_events import Outcome
from holdfast.model.detector_alarm import Alarm
from holdfast.model.incident_record import HELD
from holdfast.model.job_phase import Phase


def start_if_wanted(state: JobState, now: float) -> str:
    """Pause the job if an order, a release or new nodes need a restart. Return the reason; "" if nothing does."""
    leaving = sorted(state.nodes.active & state.requests.evicting.keys()) if state.requests.evicting else []
    drained = sorted(state.nodes.active & state.requests.draining.keys()) if state.requests.draining else []
    if state.requests.held:
        return pause_job(state, now, f"{HELD}{state.requests.held}")
    if leaving:
        why = f"{', '.join(leaving)} evicted by {state.requests.evicting[leaving[0]]}"
        return pause_job(state, now, why, leaving=tuple(leaving))
    if state.releases.is_due(now) and state.releases.waiting is not None:
        return pause_job(state, now, f"release {state.releases.waiting.number}", state.releases.waiting.number)
    if drained and len(state.nodes.usable_pool) >= len(drained):
        why = f"{', '.join(drained)} drained by {state.requests.draining[drained[0]]}"
        return pause_job(state, now, why, leaving=tuple(drained))
    if state.phase is Phase.TRAINING and now >= state.grow_at and state.nodes.may_grow():
        count = len(state.nodes.usable_pool)
        return pause_job(state, now, f"{count} more {'node is' if count == 1 else 'nodes are'} there", grows=True)
    return ""


def pause_job(
    state: JobState, now: float, why: str, release: int = 0, *, grows: bool = False, leaving: tuple[str, ...] = ()
) -> str:
    """End all ranks for a planned restart. If an earlier planned restart has made no step yet, the new one replaces it.
    If the job grows, ranks that can continue in a larger job are parked instead of ended. If nodes leave, so are ranks
    that can continue without them; if these hold the job's state, they finish their step and hand it over first."""
    if state.incident is None:
        replaced = state.pause
        pause = state.interruption = Pause.begin_pause(now, why, state.generation, state.progress)
        pause.good_at = max(pause.good_at, min(state.taken_over_at, now))  # as with an incident
        pause.for_release = release
        pause.parked = (grows and can_grow(state)) or (bool(leaving) and can_hand_over(state, leaving))
        if replaced:
            pause.take_over(replaced)
    else:
        recovery_phases.begin_pause(state.incident, now)
    stop = launching.make_stop(state)
    if state.pause and state.pause.parked:
        stop = make_parking(state, stop)
        stop = add_hand_over(state, stop, leaving) if leaving else stop
    state.emit(stop)
    state.enter(Phase.PAUSING, stop.id)
    state.paused_for, state.next_move = why, f"pausing: {why}"
    return state.next_move


def on_paused(state: JobState, now: float, event: Outcome) -> str:
    """Evict the nodes that did not confirm the stop. Then launch or wait for nodes."""
    state.nodes.unstopped = set(event.failed)
    launching.fence_unstopped(state, now, event.failed)
    match state.interruption:
        case Pause() as pause:
            pause.stopped_at = now
        case Incident() as incident:
            recovery_phases.end_pause(incident, now)
    left = f"{launching.evict_nodes(state, now, event.failed, ())}, as it did not answer; " if event.failed else ""
    state.nodes.ended, state.nodes.back = set(), {}
    return f"{left}{launching.launch_or_wait(state, now)}"


def on_alarm_in_pause(state: JobState, now: float, alarm: Alarm) -> str:
    """Open an incident during a planned restart. The incident's restart also does what was planned."""
    first = state.incident is None
    incident = incident_course.add_failure(state, now, alarm)
    incident.was_pausing |= first
    next(state.ids)  # journals have counted a Stop here that nobody sends; without it all later numbers would differ
    state.enter(Phase.STOPPING, state.awaited)  # the ranks are being ended already
    return incident_course.describe_round(incident)
