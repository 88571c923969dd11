"""People's orders: whether the job can take an order in its present state, and what the order will lead to."""

import msgspec

from holdfast.core.decide.job_view import JobView
from holdfast.model.event import Order, Phase
from holdfast.model.release import Release

VERBS = ("stop", "update", "rollback", "hold", "resume", "evict", "drain", "approve")
_RUNNING = (Phase.STARTING, Phase.TRAINING)
_SOON = "as soon as what is under way now is done"


class OrderBody(msgspec.Struct, frozen=True, kw_only=True):
    """An order as it is sent to the API."""

    verb: str
    code: int = 0
    now: bool = False
    node: str = ""
    release: Release | None = None
    number: int = 0
    window_s: float = 0.0

    def make_order(self, who: str) -> Order:
        """Return the order, as given by a person whose name is proved."""
        return Order(
            verb=self.verb,
            who=who,
            code=self.code,
            now=self.now,
            node=self.node,
            release=msgspec.structs.replace(self.release, who=who) if self.release else None,
            number=self.number,
            window_s=self.window_s,
        )


class OrderReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an order that is now in the journal."""

    seq: int  # of its entry
    next: str  # what happens
    taken: bool = True


def order_refusal(view: JobView, order: Order) -> str:
    """Say in one sentence why an order cannot be taken; "" if it can."""
    if order.verb not in VERBS:
        return f"there is no order '{order.verb}'; there are {', '.join(VERBS)}"
    if order.verb != "stop" and view.phase in (Phase.ENDING, Phase.DONE):
        return f"the job is ending, so it takes no order but stop; '{order.verb}' comes too late"
    match order.verb:
        case "update" if order.release is None:
            return "an update needs a release; send one with holdfast update"
        case "update" if order.release and (bad := view.rolled_back_as(order.release)):
            return f"this is release {bad} again, which was rolled back: {view.fate_reasons[bad]}"
        case "rollback":
            return view.rollback_refusal(order.number)
        case "hold" if view.held_by:
            return f"{view.held_by} holds the job already; holdfast resume lets it go on"
        case "hold" if view.question:
            return f"the job stands, and asks: {view.question}; answer with holdfast approve or stop"
        case "resume" if not view.held_by and view.question:
            return f"nobody holds the job, it asks: {view.question}; answer with holdfast approve or stop"
        case "resume" if not view.held_by:
            return f"nobody holds the job, it is {view.phase}; there is nothing to resume"
        case "approve" if not view.question:
            return f"the job asks nothing, it is {view.phase}; there is nothing to approve"
        case "evict" | "drain":
            return _why_node_stays(view, order)
    return ""


def _why_node_stays(view: JobView, order: Order) -> str:
    """Say why a node cannot be sent away; empty if it can."""
    node, active = order.node, view.active
    beside = {*view.pool, *view.coming, *view.under_probe}
    if not node:
        return f"say which node to {order.verb}; there are {_list_nodes(active | beside)}"
    if order.verb == "evict" and node in view.fenced:
        return ""  # a person says that it is dead
    if node in view.gone and node not in active | beside:
        return f"{node} has left the job already"
    if node not in active | beside:
        return f"there is no node '{node}' in this job; there are {_list_nodes(active | beside)}"
    told = view.evicting if order.verb == "evict" else view.draining
    if node in told:
        return f"{told[node]} has ordered that already: {node} leaves as soon as it can"
    left = len(active | set(view.pool)) - 1
    if node in active and not view.job.can_acquire and left < view.job.min_nodes and order.verb == "evict":
        short = f"{left} nodes of the {view.job.min_nodes} that the job needs"
        return f"without {node} there are {short}; start another host first, or drain it"
    return ""


def _list_nodes(nodes: frozenset[str]) -> str:
    return ", ".join(sorted(nodes)) or "none yet"


def describe_effect(view: JobView, order: Order) -> str:
    """Say what an order will lead to in the job's present state; call this before the decider gets the order."""
    when = "now" if view.phase in _RUNNING else _SOON
    match order.verb:
        case "hold" if view.phase in (Phase.WAITING, Phase.HELD):
            return "nothing is launched until holdfast resume; nodes and state are kept"
        case "hold":
            return f"all ranks are ended {when}; nodes and state are kept until holdfast resume"
        case "resume" | "approve":
            return "all ranks are launched again, from the newest state that all of them can get"
        case "evict" if order.node in view.fenced:
            return f"{order.node} counts as ended: nobody waits any longer for its ranks to end themselves"
        case "evict" | "drain" if order.node not in view.active:
            return f"{order.node} has no ranks, and leaves now"
        case "evict" if view.phase is Phase.HELD:
            return f"{order.node} leaves when the job goes on"
        case "evict":
            return f"{order.node} leaves {when}: all ranks are ended, and launched again without it"
        case "drain":
            return f"{order.node} leaves when a standby can take its place, {_describe_standbys(view)}"
    return ""


def _describe_standbys(view: JobView) -> str:
    if view.pool:
        return f"and {len(view.pool)} {'waits' if len(view.pool) == 1 else 'wait'}"
    if view.coming or view.under_check or view.job.standbys:
        return "of which there is none now"
    return "but this job keeps none; holdfast evict waits for no standby"
