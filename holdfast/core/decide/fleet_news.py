"""Reactions to the fleet's reports on its nodes: which are queued, gone, or about to be taken away."""

from collections.abc import Mapping, Set

from holdfast.core.decide import launching
from holdfast.core.decide.job_state import JobState
from holdfast.core.decide.pending_operator_requests import FLEET
from holdfast.core.incident.first_cause import with_word
from holdfast.core.incident.ladder import GAVE_UP
from holdfast.core.membership.seating import next_seats
from holdfast.core.rank_ranges import format_nodes
from holdfast.model.action import Dismissal, Say
from holdfast.model.decider_events import Outcome
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.fleet_node_reports import FleetNode, FleetReport, FleetState
from holdfast.model.job_phase import Phase

OUT_OF_TIME = 95  # exit code: the fleet takes all nodes away; the same job can go on from its last checkpoint
REFUSED = 2  # exit code: the fleet refuses nodes for good, as for a setting that is wrong


def on_fleet_report(state: JobState, now: float, event: FleetReport) -> str:
    """Record which nodes the fleet reports as changed. Replace nodes that are gone, unless they had a seat."""
    nodes = state.nodes
    waited = nodes.waits_in_queue
    nodes.standbys.take_report(now, event.nodes)
    _join_doubts(state, event.nodes)
    _tell_stuck(state, event.nodes)
    gone = {node: seen for node, seen in event.nodes.items() if seen.state is FleetState.GONE}
    freed = [node for node in gone if state.fence.note_empty(node)]
    told = [_part_with_gone(state, now, gone)]
    if state.phase is not Phase.WAITING:
        return "; ".join(filter(None, told))
    if (waited or nodes.waits_in_queue) and state.wait_until is not None:
        state.wait_until = now + state.limits.wait_s  # a job is not ended because a queue is long
    if freed or told[0]:
        told.append(launching.launch_or_wait(state, now))
    return "; ".join(filter(None, told))


def add_doubts(state: JobState, alarm: Alarm) -> Alarm:
    """Return the alarm of a node's silence with what the fleet has said of that node, if the fleet is in doubt too. Two
    who do not know of each other then say the same."""
    if alarm.kind is not Kind.SILENCE or len(alarm.suspects) != 1:
        return alarm
    [node] = alarm.suspects
    return with_word(alarm, state.nodes.standbys.fleet.doubts_about(node))


def _join_doubts(state: JobState, nodes: Mapping[str, FleetNode]) -> None:
    """Add what the fleet says of silent nodes to the open incident."""
    incident, fleet = state.incident, state.nodes.standbys.fleet
    for node in nodes if incident is not None else ():
        if word := fleet.doubts_about(node):
            state.current_incident.on_fleet_word(node, word)


def _tell_stuck(state: JobState, nodes: Mapping[str, FleetNode]) -> None:
    """Say why nodes do not start that have a machine, as with an image that cannot be pulled; once for each node."""
    standbys = state.nodes.standbys
    fleet = standbys.fleet
    stuck = fleet.find_stuck(node for node in nodes if node in standbys.coming)
    for why in sorted({*stuck.values()}):
        fleet.last_word = why
        if new := [node for node in stuck if stuck[node] == why and node not in fleet.told_stuck]:
            state.emit(Say(text=f"{format_nodes(new)} {'does' if len(new) == 1 else 'do'} not start: {why}"))
    fleet.told_stuck.update(stuck)


def on_parting_failed(state: JobState, event: Outcome) -> str:
    """Tell why the fleet could not end an evicted node. It may only now have found out that the machine is lost."""
    node, word = state.nodes.standbys.fleet.parting[event.action], event.detail or "it does not say why"
    if state.incident is not None and state.incident.on_fleet_word(node, word):
        return f"incident {state.incident.number}: the fleet says of {node}: {word}"
    said = f"{node} was evicted, and its fleet could not end it: {word}"
    state.emit(Say(text=said))
    return said


def _part_with_gone(state: JobState, now: float, gone: dict[str, FleetNode]) -> str:
    """Dismiss nodes that are gone and had no seat. Ask for other nodes after a pause that grows each time."""
    standbys = state.nodes.standbys
    beside = standbys.beside_job(gone)
    said = []
    for why in sorted({_reason(gone[node]) for node in beside}):
        those = [node for node in beside if _reason(gone[node]) == why]
        if never_up := [node for node in those if node in standbys.coming]:
            said.append(f"{', '.join(never_up)} ended before the job had it: {why}")
            for node in never_up:
                state.emit(*standbys.dismiss_node(node, None, f"gone: {why}", standbys.fleet.dismissal_of(node)))
            state.emit(Say(text=said[-1]))
            standbys.fleet.last_word = why
        if was_up := [node for node in those if node not in never_up]:
            standbys.faults.on_evicted(was_up, {node: why for node in was_up if gone[node].failed}, 0)
            said.append(launching.part_with_beside(state, was_up, Kind.SILENCE, why))
    if said:
        said.append(f"others are asked for in {standbys.pause_requests(now):g} s")
    return "; ".join(said)


def _reason(seen: FleetNode) -> str:
    return seen.reason or "the fleet does not say why"


def tell_queue(state: JobState) -> None:
    """Say for how many queued nodes the job waits and why, whenever that changes."""
    standbys = state.nodes.standbys
    queue, fleet = standbys.fleet.describe_queue(standbys.coming), standbys.fleet
    count = len(standbys.queued)
    said = f"waiting for {count} {'node' if count == 1 else 'nodes'}: {queue}" if queue else ""
    if said and said != fleet.told_queue:
        state.emit(Say(text=said))
    fleet.told_queue = said


def on_acquired(state: JobState, now: float, event: Outcome) -> str:
    """Record the nodes that the fleet promises. If the fleet refuses nodes, end a job that cannot start without them.
    Any other job asks again later."""
    nodes, standbys = state.nodes, state.nodes.standbys
    told = standbys.on_acquired(now, event, nodes.active)
    if not event.refused:
        return told
    if state.generation == 0 and nodes.node_count + len(standbys.coming) < nodes.fewest_nodes:
        return launching.finish_job(state, now, REFUSED, f"the fleet refuses nodes: {event.detail}")
    pause_s = standbys.pause_requests(now)
    if event.detail != standbys.fleet.last_word:
        state.emit(Say(text=f"the fleet refuses nodes: {event.detail}; it is asked again after growing pauses"))
    standbys.fleet.last_word = event.detail
    return f"{told}; asked again in {pause_s:g} s"


def drain_leaving(state: JobState, now: float) -> str:
    """Drain nodes that the fleet will take away, and evict them just before; return in words what was done."""
    nodes, standbys, requests = state.nodes, state.nodes.standbys, state.requests
    fleet = standbys.fleet
    due, leaving = fleet.due_nodes(now, standbys.patience_s)
    for node in [node for node, who in requests.draining.items() if who == FLEET and node not in due]:
        del requests.draining[node]  # it may stay for longer
    spare, leaves = due & nodes.pool.keys(), {n for n in due if nodes.is_active(n) and not requests.who_wants_gone(n)}
    told = "; ".join(filter(None, (_part_with_leaving(state, now, spare), _tell_leaving(state, now, leaves))))
    over = {node for node in leaving if nodes.is_active(node)}
    return "; ".join(filter(None, (told, _let_go(state, now, over) if over else "")))


def _part_with_leaving(state: JobState, now: float, spare: Set[str]) -> str:
    """Dismiss standbys that the fleet will take away, and tell a person. `spare` are these standbys."""
    if not spare:
        return ""
    standbys = state.nodes.standbys
    said = _describe_leaving(state, now, spare, f"standby{'s' if len(spare) > 1 else ''} ")
    for node in sorted(spare):
        state.emit(*standbys.dismiss_node(node, None, "the fleet will take it away", Dismissal.DRAINED))
    missing = standbys.count_missing(count_staying(state), state.nodes.links.not_awaited(now))
    state.emit(Say(text=f"{said}: {_asked_for(missing)}" if missing > 0 else said))
    return said


def count_staying(state: JobState) -> int:
    """Return the number of nodes that stay in their seats: neither evicted nor to be drained."""
    return len(state.nodes.seats) - len(state.nodes.out) - len(state.requests.draining)


def _asked_for(count: int) -> str:
    return f"{'another is' if count == 1 else 'others are'} asked for"


def _tell_leaving(state: JobState, now: float, new: Set[str]) -> str:
    if not new:
        return ""
    state.requests.draining |= dict.fromkeys(sorted(new), FLEET)
    said = _describe_leaving(state, now, new)
    state.emit(Say(text=f"{said}: {_asked_for(len(new))}"))
    return said


def _describe_leaving(state: JobState, now: float, nodes: Set[str], what: str = "") -> str:
    fleet = state.nodes.standbys.fleet
    why = ", ".join(sorted({fleet.nodes[node].reason for node in nodes} - {""}))
    left = _time_left(state, now, nodes)
    return f"the fleet takes {what}{format_nodes(sorted(nodes))} away {left}{f' ({why})' if why else ''}"


def _time_left(state: JobState, now: float, nodes: Set[str]) -> str:
    ends = state.nodes.standbys.fleet.ends
    left_s = max(0.0, min(ends[node].at for node in nodes) - now)
    return f"in {left_s:.0f} s" if left_s < 180 else f"in {left_s / 60:.0f} min"


def _let_go(state: JobState, now: float, over: Set[str]) -> str:
    """Evict nodes just before the fleet takes them away, if the job can go on without them. If the fleet takes all
    nodes together and too few new nodes have come, end the job while states can still be written. Otherwise the job
    goes on until the nodes are gone."""
    nodes, fleet = state.nodes, state.nodes.standbys.fleet
    last_at = max(fleet.ends[node].at for node in over)
    all_end = all(fleet.ends_by(node, last_at + state.limits.leave_s) for node in nodes.active)
    if all_end and len(nodes.usable_pool) < nodes.fewest_nodes:
        first_s = min(fleet.ends[node].at for node in nodes.active) - now
        last_s = max(state.limits.shutdown_grace_s, first_s / 2)
        limit = "" if any(fleet.ends[node].sudden for node in nodes.active) else "time limit"
        why = ", ".join(sorted({fleet.nodes[node].reason for node in nodes.active} - {""})) or limit
        told = f"{f'{why}: ' if why else ''}the fleet takes all nodes away {_time_left(state, now, nodes.active)}"
        told += ", and too few others have come"
        return finish_out_of_time(state, now, told, "; the job can go on from its last checkpoint", last_s=last_s)
    if next_seats(state.job, nodes.seats, nodes.out | over, nodes.usable_pool, may_shrink=True, mesh=nodes.mesh):
        state.requests.evicting |= {node: FLEET for node in sorted(over) if node not in state.requests.evicting}
    return ""


def finish_out_of_time(
    state: JobState, now: float, why: str, hope: str = "", *, grace_s: float | None = None, last_s: float | None = None
) -> str:
    """End a job whose nodes are all taken away. The exit code says that the job may continue with other nodes. After
    too many such ends without a new step, the exit code says that the job gives up."""
    ends, best = state.failures.count_fruitless_end(), state.failures.best
    if ends < state.limits.attempts:
        return launching.finish_job(state, now, OUT_OF_TIME, why + hope, grace_s, last_s=last_s)
    times, since = f"{ends} times in a row" if ends > 1 else "once", f" after step {best}" if best >= 0 else ""
    told = f"{why}; the job has lost all nodes or was ended {times} without a new step{since}, so no others are asked "
    told += "for: it needs more time each time, or checkpoints more often"
    return launching.finish_job(state, now, GAVE_UP, told, grace_s, last_s=last_s)


def go_on(state: JobState, now: float) -> str:
    """Resume a job that ended because the fleet took all nodes away. Dismiss these nodes and wait for other nodes."""
    nodes, standbys = state.nodes, state.nodes.standbys
    why = "the fleet has taken it away"
    for node in sorted({*nodes.pool, *standbys.coming, *standbys.under_probe}):
        state.emit(*standbys.dismiss_node(node, None, why, Dismissal.GONE))
    left = sorted(nodes.active)
    nodes.out.update(left)
    for node in left:
        state.emit(*standbys.dismiss_node(node, None, why, Dismissal.GONE))
    state.requests.on_nodes_left(tuple(left))
    standbys.acquiring.clear()  # whoever was to come was given back with all others
    state.exit_code = state.wait_until = state.last_call_at = None
    return f"the job goes on with other nodes; {launching.wait_for_nodes(state, now)}"
