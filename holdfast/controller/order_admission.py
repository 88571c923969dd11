"""Admission of people's orders: whether the job can take an order in its present state, and what it will lead to."""

from collections.abc import Collection
from enum import StrEnum
from typing import Annotated, NamedTuple, get_args

import msgspec

from holdfast.core.decide.job_view import JobView
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Order, OrderVerb
from holdfast.model.job_phase import Phase
from holdfast.model.message_bounds import Name, Number

VERBS: tuple[OrderVerb, ...] = get_args(OrderVerb)
NO_SUCH_ORDER = f"there is no such order; the orders are {', '.join(VERBS)}"
_WHEN = {Phase.STARTING: "now", Phase.TRAINING: "now", Phase.LAUNCHING: "after this launch"}
_LATER = "before the next launch"  # in all other phases


class OrderBody(msgspec.Struct, frozen=True, kw_only=True):
    """An order as it is sent to the API."""

    verb: str
    code: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    now: bool = False
    node: Name = ""
    release: Release | None = None
    number: Number = 0
    window_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)] = 0.0

    def make_order(self, who: str) -> Order | None:
        """Return the order as given by `who`, whose identity is proved. Return None if no order has this verb."""
        verb = next((verb for verb in VERBS if verb == self.verb), None)
        if verb is None:
            return None
        return Order(
            verb=verb,
            who=who,
            code=self.code,
            now=self.now,
            node=self.node,
            release=msgspec.structs.replace(self.release, who=who) if self.release else None,
            number=self.number,
            window_s=self.window_s,
        )


class OrderReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an order that is now in the journal, or that was only previewed."""

    seq: int  # of its entry, or of the newest one
    next: str  # what happens
    taken: bool = True  # False: it was a preview


class OrderFault(StrEnum):
    """Why the job cannot take an order in its present state."""

    JOB_ENDING = "job_ending"
    NO_RELEASE = "no_release"
    SAME_AS_ROLLED_BACK = "same_as_rolled_back"
    NO_ROLLBACK = "no_rollback"
    HELD_ALREADY = "held_already"
    ASKING = "asking"  # the job waits for an answer
    NOT_HELD = "not_held"
    NOT_ASKING = "not_asking"
    NODE_NOT_NAMED = "node_not_named"
    NODE_LEFT = "node_left"
    NO_SUCH_NODE = "no_such_node"
    ORDERED_ALREADY = "ordered_already"
    TOO_FEW_NODES = "too_few_nodes"


class OrderRefusal(NamedTuple):
    fault: OrderFault
    text: str  # one sentence for the person


def order_refusal(view: JobView, order: Order, linked: Collection[str] = ()) -> OrderRefusal | None:
    """Return why an order cannot be taken; None if it can. `linked` are all connected nodes. The job does not know
    those of them that are not ready yet."""
    if order.verb != "stop" and view.phase in (Phase.ENDING, Phase.DONE):
        text = f"the job is ending and takes only stop; '{order.verb}' comes too late"
        return OrderRefusal(OrderFault.JOB_ENDING, text)
    match order.verb:
        case "update":
            return _update_refusal(view, order)
        case "rollback":
            text = view.rollback_refusal(order.number)
            return OrderRefusal(OrderFault.NO_ROLLBACK, text) if text else None
        case "hold" | "resume" | "approve":
            return _hold_refusal(view, order)
        case "evict" | "drain":
            return _leave_refusal(view, order, linked if order.verb == "evict" else ())
        case "stop":
            return None


def _update_refusal(view: JobView, order: Order) -> OrderRefusal | None:
    if order.release is None:
        return OrderRefusal(OrderFault.NO_RELEASE, "an update needs a release; send one with holdfast update")
    if bad := view.rolled_back_as(order.release):
        text = f"this is release {bad} again, which was rolled back: {view.fate_reasons[bad]}"
        return OrderRefusal(OrderFault.SAME_AS_ROLLED_BACK, text)
    return None


def _hold_refusal(view: JobView, order: Order) -> OrderRefusal | None:
    """Return why the job cannot be held, resumed or approved; None if it can."""
    answer = f"it waits for an answer: {view.question}; answer with holdfast approve or holdfast stop"
    match order.verb:
        case "hold" if view.held_by:
            text = f"{view.held_by} already holds the job; let it go on with holdfast resume"
            return OrderRefusal(OrderFault.HELD_ALREADY, text)
        case "hold" if view.question:
            return OrderRefusal(OrderFault.ASKING, f"no rank of the job runs, and {answer}")
        case "resume" if not view.held_by and view.question:
            return OrderRefusal(OrderFault.ASKING, f"nobody holds the job; {answer}")
        case "resume" if not view.held_by:
            text = f"nobody holds the job (it is {view.phase}), so there is nothing to resume"
            return OrderRefusal(OrderFault.NOT_HELD, text)
        case "approve" if not view.question:
            text = f"the job asks nothing (it is {view.phase}), so there is nothing to approve"
            return OrderRefusal(OrderFault.NOT_ASKING, text)
    return None


def _leave_refusal(view: JobView, order: Order, linked: Collection[str]) -> OrderRefusal | None:
    """Return why a node cannot be evicted or drained; None if it can."""
    node, active = order.node, view.active
    beside = {*view.pool, *view.coming, *view.under_probe, *(name for name in linked if view.may_return(name))} - active
    there = f"the nodes are {', '.join(sorted(active | beside))}" if active | beside else "the job has no nodes yet"
    if not node:
        return OrderRefusal(OrderFault.NODE_NOT_NAMED, f"name the node to {order.verb}; {there}")
    if order.verb == "evict" and node in view.fenced:
        return None  # a person says that it is dead
    if node in view.gone and node not in active | beside:
        return OrderRefusal(OrderFault.NODE_LEFT, f"{node} has already left the job")
    if node not in active | beside:
        return OrderRefusal(OrderFault.NO_SUCH_NODE, f"there is no node '{node}' in this job; {there}")
    told = view.evicting if order.verb == "evict" else view.draining
    if node in told:
        text = f"{told[node]} has already ordered that; {node} leaves as soon as it can"
        return OrderRefusal(OrderFault.ORDERED_ALREADY, text)
    left = len(active | set(view.usable_pool)) - 1
    if node in active and not view.job.can_acquire and left < view.fewest_nodes and order.verb == "evict":
        short = f"without {node} the job has {left} of the {view.fewest_nodes} nodes that it needs"
        text = f"{short}; start another host first, or use holdfast drain"
        return OrderRefusal(OrderFault.TOO_FEW_NODES, text)
    return None


def describe_effect(view: JobView, order: Order) -> str:
    """Say what an order will lead to in the job's present state; call this before the decider gets the order."""
    when = _WHEN.get(view.phase, _LATER)
    match order.verb:
        case "hold" if view.phase in (Phase.WAITING, Phase.HELD):
            return "no rank is launched until holdfast resume; nodes and state are kept"
        case "hold":
            return f"all ranks stop {when}; nodes and state are kept until holdfast resume"
        case "resume" | "approve":
            return "all ranks are launched again, from the newest state that all of them can get"
        case "evict" if order.node in view.fenced:
            return f"{order.node} counts as dead: the job no longer waits for its ranks to end"
        case "evict" | "drain" if order.node not in view.active:
            return f"{order.node} has no ranks and leaves now"
        case "evict" if view.phase is Phase.HELD:
            return f"{order.node} leaves when the job goes on"
        case "evict":
            text = f"{order.node} leaves {when}: all ranks stop and are launched again without it"
            stands = not view.usable_pool and len(view.active) - 1 < view.fewest_nodes
            return f"{text}; it stands until a node is ready (holdfast drain trains until then)" if stands else text
        case "drain":
            return f"{order.node} leaves when a standby can take its seat; {_describe_standbys(view)}"
    return ""


def _describe_standbys(view: JobView) -> str:
    if usable := len(view.usable_pool):
        return f"{usable} {'standby waits' if usable == 1 else 'standbys wait'}"
    if view.pool or view.coming or view.under_check or view.job.standbys:
        return "none is ready yet"
    return "this job keeps none, so one more is asked for (holdfast evict waits for none)"
