"""Orders of people to a running job: hold or resume it, evict or drain nodes, update or roll back, approve."""

from holdfast.core.decide import launching, waiting_for_people
from holdfast.core.decide.job_state import JobState
from holdfast.core.incident.incident_case import ALL_IN_DOUBT
from holdfast.core.incident.ladder import GAVE_UP
from holdfast.model.action import Dismissal
from holdfast.model.decider_events import Order
from holdfast.model.incident_record import Remedy, Verdict
from holdfast.model.job_phase import Phase


def on_order(state: JobState, now: float, order: Order) -> str:
    match order.verb:
        case "update" if order.release is not None:
            nodes = (*(seat.node for seat in state.nodes.active_seats), *sorted(state.nodes.pool))
            reason, actions = state.releases.order_update(order, nodes, state.ids)
            state.emit(*actions)
            return reason
        case "rollback":
            return state.releases.rollback_refusal(order.number) or state.releases.order_rollback(
                now, order.number, order.who
            )
        case "hold":
            state.requests.held = order.who
            if state.phase is Phase.WAITING:
                state.wait_until = None
                waiting_for_people.stand_still(state, now)
            return f"held by {order.who}"
        case "resume" | "approve":
            return on_resume_order(state, now, order)
        case "evict" | "drain":
            return on_leave_order(state, now, order)
    return f"{order.verb} by {order.who} changes nothing"


def on_leave_order(state: JobState, now: float, order: Order) -> str:
    node, gone = order.node, f"{order.verb} by {order.who}"
    if order.verb == "evict" and node in state.fence.nodes:
        state.fence.note_empty(node)
        if node in state.nodes.active:
            state.requests.evicting[node] = order.who
        going_on = f"; {launching.launch_or_wait(state, now)}" if state.phase is Phase.WAITING else ""
        return f"{node} is dead (reported by {order.who}){going_on}"
    if node in state.nodes.active:
        (state.requests.evicting if order.verb == "evict" else state.requests.draining)[node] = order.who
        return f"{node} will leave ({order.verb} by {order.who})"
    if order.verb == "drain" and not state.nodes.standbys.beside_job((node,)):
        return f"there is no node {node} to {order.verb}"
    cause = Dismissal.EVICTED if order.verb == "evict" else Dismissal.DRAINED
    state.emit(*state.nodes.standbys.dismiss_node(node, None, gone, cause))
    return f"{node} leaves: {gone}"


def on_resume_order(state: JobState, now: float, order: Order) -> str:
    if state.incident is not None and state.phase is Phase.HELD:
        state.incident.on_answer(now, held=bool(state.requests.held))
    state.requests.held = ""
    if state.pause is not None:
        state.pause.released_at = now
    if state.requests.asking:
        state.requests.clear_question()
        state.failures.forgive_all()
        if state.incident is not None:
            state.incident.forgiven, silent = state.incident.rounds, state.incident.silent
            launching.evict_nodes(state, now, silent, silent)
            state.incident.absent, state.nodes.back = (), {}
            state.resume_point.from_zero |= state.incident.alarms[0].klass == ALL_IN_DOUBT
            reason = f"approved by {order.who}: restarted in place"
            state.verdict = Verdict(remedy=Remedy.RESTART, reason=reason)
    if state.phase is not Phase.HELD:
        return f"{order.verb} by {order.who}"
    return f"{order.verb} by {order.who}; {launching.launch_or_wait(state, now)}"


def on_held_tick(state: JobState, now: float) -> str:
    late = launching.drop_late_nodes(state, now)
    if not state.requests.asking or state.requests.held or now < state.requests.asks_until:
        return late
    return launching.finish_job(state, now, GAVE_UP, f"{state.requests.asking}; no approval came")
