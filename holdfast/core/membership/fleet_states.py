"""The fleet's latest report on each node: whether it is queued or gone, and when the fleet will take it away."""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from holdfast.model.action import Action, Dismiss, Dismissal
from holdfast.model.decider_events import Event, Outcome
from holdfast.model.fleet_node_reports import FleetNode, FleetState


class NodeEnd(msgspec.Struct, frozen=True, kw_only=True):
    """When the fleet will take a node away, and when it said so."""

    at: float
    told_at: float
    sudden: bool  # it was to stay for longer before: a preemption, and no time limit that was known from the start

    @property
    def half_at(self) -> float:
        return (self.told_at + self.at) / 2


class FleetStates:
    """The newest reports of the fleet, as part of the job's state."""

    def __init__(self, leave_s: float) -> None:
        self.nodes: dict[str, FleetNode] = {}
        self.last_word = ""  # why nodes that were asked for did not come
        self.told_queue = ""  # the newest sentence about the queue on the console
        self.told_stuck: set[str] = set()  # nodes of which the console says why they do not start
        self.wake_at: float | None = None  # when a node must next be drained or let go
        self.parting: dict[int, str] = {}  # evicted nodes that the fleet is ending, by action
        self.ends: dict[str, NodeEnd] = {}
        self._leave_s = leave_s
        self._known_for: float | None = None  # for which time of a new node what is due is known; None: look anew
        self._due: frozenset[str] = frozenset()
        self._over: frozenset[str] = frozenset()

    def take_report(self, now: float, nodes: Mapping[str, FleetNode]) -> None:
        self._known_for = None
        for node, seen in nodes.items():
            before, self.nodes[node] = self.nodes.get(node), seen
            on_machine = before is not None and before.state is not FleetState.QUEUED
            if not seen.ends_at or seen.state in (FleetState.QUEUED, FleetState.GONE):
                self.ends.pop(node, None)
            elif node not in self.ends or self.ends[node].at != seen.ends_at:
                later = node in self.ends and self.ends[node].at < seen.ends_at
                self.ends[node] = NodeEnd(at=seen.ends_at, told_at=now, sudden=on_machine and not later)

    def find_stuck(self, nodes: Iterable[str]) -> dict[str, str]:
        """Return those of these nodes that have a machine and do not start, each with the cluster's reason."""
        known = {node: self.nodes[node] for node in nodes if node in self.nodes}
        stuck = {node: seen for node, seen in known.items() if seen.state is FleetState.STARTING and not seen.ends_at}
        return {node: seen.reason for node, seen in stuck.items() if seen.reason}

    def forget_node(self, node: str) -> None:
        self.nodes.pop(node, None)
        self.told_stuck.discard(node)
        if self.ends.pop(node, None):
            self._known_for = None

    def doubt_gone(self, node: str) -> None:
        """Forget the fleet's report that this node is gone, because the node reports or gets ranks."""
        if self.is_gone(node):
            self.forget_node(node)

    def is_queued(self, node: str) -> bool:
        return node in self.nodes and self.nodes[node].state is FleetState.QUEUED

    def is_gone(self, node: str) -> bool:
        """Return whether the fleet has proof that nothing of this node runs."""
        return node in self.nodes and self.nodes[node].state is FleetState.GONE

    def doubts_about(self, node: str) -> str:
        """Return why the fleet cannot tell whether this node runs, in the cluster's words; "" if it can."""
        seen = self.nodes.get(node)
        return seen.reason if seen is not None and seen.state is FleetState.UNKNOWN else ""

    def watch_evictions(self, event: Event, actions: Iterable[Action]) -> None:
        """Remember the actions that end evicted nodes until their outcome, which says why if the fleet cannot."""
        if isinstance(event, Outcome):
            self.parting.pop(event.action, None)
        found = (one for one in actions if isinstance(one, Dismiss) and one.cause is Dismissal.EVICTED)
        self.parting |= {one.id: one.node for one in found}

    def dismissal_of(self, node: str) -> Dismissal:
        """Return why a lost node leaves: GONE if the fleet took it and its machine did not fail, else EVICTED."""
        return Dismissal.GONE if self.is_gone(node) and not self.nodes[node].failed else Dismissal.EVICTED

    def near(self, node: str) -> tuple[str, ...]:
        return self.nodes[node].near if node in self.nodes else ()

    def describe_queue(self, nodes: Iterable[str]) -> str:
        """Return how many of these nodes are queued and why, in the cluster's words; "" if none is."""
        if not self.nodes:
            return ""
        reasons = Counter(self.nodes[node].reason for node in nodes if self.is_queued(node))
        told = {f"queued, {reason}" if reason else "queued": count for reason, count in sorted(reasons.items())}
        return next(iter(told)) if len(told) == 1 else "; ".join(f"{count} {words}" for words, count in told.items())

    def due_nodes(self, now: float, takes_s: float) -> tuple[frozenset[str], frozenset[str]]:
        """Return the nodes to replace now, and the nodes that must leave now. `takes_s` is the time that a new node
        takes to arrive.

        The answer changes when the next node is due (`wake_at`) or the fleet reports. If the fleet announces an earlier
        end than before, the node is replaced at once. If the end was known from the start, the node is replaced just in
        time, but never in the first half of its stay, because short limits would otherwise cause too many restarts.
        """
        if self._known_for != takes_s or (self.wake_at is not None and self.wake_at <= now):
            starts = {node: self._drain_at(end, takes_s) for node, end in self.ends.items()}
            leaves = {node: max(end.half_at, end.at - self._leave_s) for node, end in self.ends.items()}
            self.wake_at = min((at for at in (*starts.values(), *leaves.values()) if at > now), default=None)
            self._due = frozenset(node for node, at in starts.items() if at <= now)
            self._over = frozenset(node for node, at in leaves.items() if at <= now)
            self._known_for = takes_s
        return self._due, self._over

    def _drain_at(self, end: NodeEnd, takes_s: float) -> float:
        return end.told_at if end.sudden else max(end.half_at, end.at - self._leave_s - takes_s)

    def ends_by(self, node: str, at: float) -> bool:
        return node in self.ends and self.ends[node].at <= at
