"""One sentence about what a job is doing now."""

from holdfast.core.decide.job_state import JobState
from holdfast.core.decide.node_wait_text import find_node_wait
from holdfast.core.decide.ongoing_planned_restart import Pause
from holdfast.core.decide.surviving_ranks import describe_short
from holdfast.core.incident import incident_text
from holdfast.core.incident.open_incident import Incident
from holdfast.core.rank_ranges import format_nodes, format_ranks
from holdfast.model.detector_alarm import Kind
from holdfast.model.job_phase import Phase


def tell_present(state: JobState, now: float, step: int, ending: str, mute: tuple[int, ...]) -> str:
    """Return one line on what the job is doing now, from its state alone: the last decision may be hours old."""
    generation, why = state.generation, _interruption_text(state)
    counted = state.progress is not None and state.progress.counted
    made = f"{incident_text.count_steps(step)} since the last launch" if counted else f"step {step}"
    match state.phase:
        case Phase.NEW:
            return "the job has not begun"
        case Phase.WAITING:
            return _waited_for(state, now) + why
        case Phase.LAUNCHING:
            where = format_nodes(seat.node for seat in state.nodes.seats)
            return f"generation {generation} is being launched on {where}{why}"
        case Phase.STARTING:
            kept = state.interruption.kept if state.interruption else 0
            old = f", {kept} of them in the {'process' if kept == 1 else 'processes'} from before" if kept else ""
            return f"the ranks of generation {generation} run{old}; no step was seen yet{why}"
        case Phase.TRAINING if state.progress and state.progress.parted:
            return f"ending: every rank has left its process group, or its script has returned, after {made}"
        case Phase.TRAINING:
            who = "the ranks that tell of steps have" if mute else "every rank has"
            untold = f"; {format_ranks(mute)} {'tell' if len(mute) > 1 else 'tells'} of none" if mute else ""
            short = f" on {on}" if (on := describe_short(state)) else ""
            return f"training{short}; {who} made {made}{untold}{_describe_stand(state, now)}"
        case Phase.STOPPING if state.incident and state.incident.parked:
            return f"ranks leave the step and stay, and those that cannot are being stopped{why}"
        case Phase.STOPPING:
            return f"all ranks are being stopped{why}"
        case Phase.PROBING:
            since = state.current_incident.stopped_at
            return f"nodes have been tested for {now - since:.0f} s{why}"
        case Phase.PAUSING if state.pause and state.pause.parked:
            return f"ranks leave the step and stay: {state.paused_for}"
        case Phase.PAUSING:
            return f"all ranks are being ended for a planned restart: {state.paused_for}"
        case Phase.HELD if state.requests.held:
            return f"no rank runs; {state.requests.held} holds the job"
        case Phase.HELD:
            return "no rank runs; waiting for holdfast approve"
        case Phase.ENDING:
            return f"the job is ending: {ending}"
        case Phase.DONE:
            return f"the job has ended: {ending}"


def _waited_for(state: JobState, now: float) -> str:
    if state.fence.until > now:
        return state.fence.describe_wait(now)
    if state.nodes.links.blocks_launch(now, state.nodes.active):
        return state.nodes.links.describe_wait(now, state.nodes.active)
    if state.not_before > now:
        return f"the next launch waits for another {state.not_before - now:.0f} s"
    wait = find_node_wait(state, now)
    return wait.describe(now) if wait else "the next launch is due"


def _interruption_text(state: JobState) -> str:
    """Return a clause about the open incident or the planned restart under way; "" if there is neither."""
    match state.interruption:
        case Incident(alarms=[_, *_]) as incident if state.phase is Phase.STARTING:  # what was so of other ranks
            return f", after incident {incident.number}: {incident.cause_text}"
        case Incident(alarms=[first, *_]) as incident:
            alike = first if first.kind is not Kind.LOSS else incident.shared_cause
            return f", as {incident.cause_text if incident.judged else incident_text.describe_cause(alike)}"
        case Pause(why=why):
            return f", after a planned restart: {why}"
    return ""


def _describe_stand(state: JobState, now: float) -> str:
    stand = state.standing
    if stand is None or stand.generation != state.generation:
        return ""
    if not stand.ranks:
        return f"; no step for {now - stand.at:.0f} s: {stand.reason.partition(': ')[2]}"
    who = f"{format_ranks(stand.ranks)} on {', '.join(stand.suspects)}"
    keep = "keeps" if len(stand.ranks) == 1 else "keep"
    return f"; {who} {keep} the others waiting for {now - stand.at:.0f} s"
