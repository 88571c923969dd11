"""Planned restarts: for a new release, for an order from a person, or to grow the job."""

from typing import TYPE_CHECKING

from holdfast.core.decide import launching, recovery
from holdfast.core.decide.operator_requests import Pause
from holdfast.core.incident.ladder import GAVE_UP
from holdfast.model.action import Stop
from holdfast.model.alarm import Alarm
from holdfast.model.event import Order, Outcome, Phase
from holdfast.model.incident_record import Remedy, Verdict

if TYPE_CHECKING:
    from holdfast.core.decide.decider import Decider


def on_order(d: "Decider", now: float, order: Order) -> str:
    match order.verb:
        case "update" if order.release is not None:
            nodes = (*(s.node for s in d.seats if s.node not in d.out), *sorted(d.pool))
            reason, actions = d.releases.order_update(order, nodes, d.ids)
            d.actions += actions
            return reason
        case "rollback":
            return d.releases.rollback_refusal(order.number) or d.releases.order_rollback(now, order.number, order.who)
        case "hold":
            d.people.held = order.who
            if d.phase is Phase.WAITING:
                d.phase, d.wait_until = Phase.HELD, None
            return f"held by {order.who}"
        case "resume" | "approve":
            return on_resume_order(d, now, order)
        case "evict" | "drain":
            return on_leave_order(d, now, order)
    return f"'{order.verb}' is no order that we know"


def on_leave_order(d: "Decider", now: float, order: Order) -> str:
    node, gone = order.node, f"{order.verb} by {order.who}"
    if order.verb == "evict" and node in d.fence.nodes:
        d.fence.note_empty(node)
        if node in d.nodes.active:
            d.people.evicting[node] = order.who
        going_on = f"; {launching.launch_or_wait(d, now)}" if d.phase is Phase.WAITING else ""
        return f"{node} has ended, as {order.who} says{going_on}"
    if node in d.nodes.active:
        (d.people.evicting if order.verb == "evict" else d.people.draining)[node] = order.who
        return f"{node} is to leave, as {order.who} wants"
    if not d.nodes.standbys.beside_job((node,)):
        return f"there is no node {node} to {order.verb}"
    d.actions += d.nodes.standbys.dismiss_node(node, None, gone)
    return f"{node} leaves: {gone}"


def on_resume_order(d: "Decider", now: float, order: Order) -> str:
    d.people.held = ""
    if d.pause is not None:
        d.pause.released_at = now
    if d.people.asking:
        d.people.clear_question()
        d.failures.forgive_all()
        if d.incident is not None:
            d.incident.forgiven = d.incident.rounds
            reason = f"approved by {order.who}: restarted in place"
            d.verdict = Verdict(remedy=Remedy.RESTART, reason=reason)
    if d.phase is not Phase.HELD:
        return f"{order.verb} by {order.who}"
    return f"{order.verb} by {order.who}; {launching.launch_or_wait(d, now)}"


def start_if_wanted(d: "Decider", now: float) -> str:
    """Pause the job if an order, a release or new nodes need a restart. Return the reason; "" if nothing does."""
    leaving = sorted(d.nodes.active & d.people.evicting.keys()) if d.people.evicting else []
    drained = sorted(d.nodes.active & d.people.draining.keys()) if d.people.draining else []
    if d.people.held:
        return pause_job(d, now, f"held by {d.people.held}")
    if leaving:
        return pause_job(d, now, f"{', '.join(leaving)} evicted by {d.people.evicting[leaving[0]]}")
    if d.releases.is_due(now) and d.releases.waiting is not None:
        return pause_job(d, now, f"release {d.releases.waiting.number}")
    if drained and len(d.pool) >= len(drained):
        return pause_job(d, now, f"{', '.join(drained)} drained by {d.people.draining[drained[0]]}")
    if d.phase is Phase.TRAINING and now >= d.grow_at and d.nodes.may_grow:
        return pause_job(d, now, f"{len(d.pool)} more nodes are there")
    return ""


def pause_job(d: "Decider", now: float, why: str) -> str:
    """End all ranks for a planned restart. A new pause replaces one that has not reached a step yet."""
    if d.incident is None:
        d.pause = Pause.begin_pause(now, why, d.generation, d.progress)
    d.phase, d.awaited = Phase.PAUSING, next(d.ids)
    nodes = tuple(s.node for s in d.seats if s.node not in d.out)
    grace_s = d.limits.stop_grace_s
    d.actions.append(Stop(id=d.awaited, generation=d.generation, nodes=nodes, grace_s=grace_s))
    return f"pausing: {why}"


def on_paused(d: "Decider", now: float, event: Outcome) -> str:
    """Evict the nodes that did not confirm the stop, then launch or wait: all other ranks are down."""
    d.nodes.unstopped = set(event.failed)
    launching.fence_unstopped(d, now, event.failed)
    if d.pause:
        d.pause.stopped_at = now
    left = f"{launching.evict_nodes(d, now, event.failed, ())}, as it did not answer; " if event.failed else ""
    d.nodes.ended, d.nodes.back = set(), {}
    return f"{left}{launching.launch_or_wait(d, now)}"


def on_alarm_in_pause(d: "Decider", now: float, alarm: Alarm) -> str:
    """Open an incident during a pause. The restart for the incident also serves what the pause was for."""
    awaited, actions = d.awaited, list(d.actions)
    d.pause, reason = None, recovery.open_trouble(d, now, alarm)
    d.awaited, d.actions = awaited, actions  # the ranks are being ended already
    return reason


def on_held_tick(d: "Decider", now: float) -> str:
    late = launching.drop_late_nodes(d, now)
    if not d.people.asking or d.people.held or now < d.people.asks_until:
        return late
    return launching.finish_job(d, now, GAVE_UP, f"{d.people.asking}; nobody answered")
