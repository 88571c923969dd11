"""The history of each node, from the journal: its role, its ranks, what it was suspected of, and its probes."""

from collections.abc import Collection, Iterable

import msgspec

from holdfast.core.decide.node_roles import NodeRole
from holdfast.model.action import Action, Dismiss, Launch, Probe, Replay
from holdfast.model.decider_events import Outcome, Ready
from holdfast.model.detector_alarm import Alarm
from holdfast.model.job_and_seats import Seat
from holdfast.model.journal_entry import Entry

_PROBES = 20  # of one node, the newest
_HERE = (NodeRole.ACTIVE, NodeRole.READY, NodeRole.ACQUIRING)


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe or a replay found on one node."""

    at: float
    what: str  # probe or replay
    ok: bool
    found: str = ""


class NodeStory(msgspec.Struct, kw_only=True):
    """The history of one node, as the journal has it."""

    node: str
    host: str = ""
    role: str = NodeRole.ACQUIRING
    first_rank: int = -1  # -1: it has no seat
    nproc: int = 0
    near: tuple[str, ...] = ()
    since: float = 0.0  # when it got this role
    alarms: int = 0  # that named it
    incidents: int = 0  # that evicted it or named it as a suspect
    last: str = ""  # what was last said of it, and not good
    lasting: str = ""  # the signature of the alarm that said so; "": no alarm did
    probes: list[ProbeResult] = []


class NodeHistory:
    """Takes journal entries one by one; `nodes` are the stories so far."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeStory] = {}
        self._trying: dict[int, tuple[str, tuple[str, ...]]] = {}  # probes and replays without an outcome

    def add(self, entry: Entry) -> None:
        match entry.event:
            case Ready(node=node, host=host, blocked=blocked):
                story = self._take_role(node, NodeRole.DISMISSED if blocked else NodeRole.READY, entry.at)
                story.host = host
                if blocked:
                    story.last, story.lasting = blocked, ""
            case Alarm(suspects=suspects, over=True, signature=signature):
                for node in suspects:
                    story = self._find_node(node)
                    if story.lasting == signature:
                        story.last = story.lasting = ""
            case Alarm(suspects=suspects, reason=reason, signature=signature):
                for node in suspects:
                    story = self._find_node(node)
                    story.alarms, story.last, story.lasting = story.alarms + 1, reason, signature
            case Outcome(action=action, nodes=nodes):
                self._on_outcome(entry, entry.event)
                for node in nodes if action not in self._trying else ():
                    self._find_node(node)  # the fleet has named it
                self._trying.pop(action, None)
        for action_asked in entry.decision.actions:
            self._on_action(action_asked, entry.at)
        if closed := entry.decision.closed:
            for node in {*closed.evicted, *closed.suspects}:
                self._find_node(node).incidents += 1
            self._take_roles(closed.evicted, NodeRole.EVICTED, entry.at)
        if changed := entry.decision.changed:
            self._take_roles(changed.evicted, NodeRole.EVICTED, entry.at)

    def _on_action(self, action: Action, at: float) -> None:
        match action:
            case Launch(seats=seats):
                self._seat_nodes(seats, at)
            case Dismiss(node=node, reason=reason):
                story = self._find_node(node)
                had_seat = story.first_rank >= 0
                self._take_role(node, NodeRole.EVICTED if had_seat else NodeRole.DISMISSED, at)
                story.last, story.lasting, story.first_rank = reason, "", -1
            case Probe(id=id, nodes=nodes):
                self._trying[id] = "probe", nodes
            case Replay(id=id, seats=seats):
                self._trying[id] = "replay", tuple(seat.node for seat in seats)

    def _on_outcome(self, entry: Entry, outcome: Outcome) -> None:
        at, (what, tried) = entry.at, self._trying.get(outcome.action, ("", ()))
        if outcome.ok:  # an evicted node that has passed its examination, and is not given back, is a standby again
            dismissed = {action.node for action in entry.decision.actions if isinstance(action, Dismiss)}
            passed = (node for node in tried if node not in outcome.failed and node not in dismissed)
            self._take_roles(passed, NodeRole.READY, at, (NodeRole.EVICTED,))
        for node in tried:
            story, found = self._find_node(node), outcome.failed.get(node, "")
            if not found and node in outcome.untested:
                found = f"no result: {outcome.detail}"
            story.probes = [*story.probes[1 - _PROBES :], ProbeResult(at=at, what=what, ok=not found, found=found)]

    def _seat_nodes(self, seats: tuple[Seat, ...], at: float) -> None:
        seated = {seat.node for seat in seats}
        for node, story in self.nodes.items():
            if story.first_rank >= 0 and node not in seated:
                story.first_rank = -1
                if story.role == NodeRole.ACTIVE:
                    self._take_role(node, NodeRole.READY, at)
        for seat in seats:
            story = self._take_role(seat.node, NodeRole.ACTIVE, at)
            story.first_rank, story.nproc, story.near = seat.first_rank, seat.nproc, seat.near

    def _take_roles(self, nodes: Iterable[str], role: NodeRole, at: float, since: Collection[str] = _HERE) -> None:
        for node in nodes:
            story = self._find_node(node)
            if story.role not in since or story.first_rank >= 0:
                continue  # it has left already, or is back by now
            self._take_role(node, role, at)

    def _take_role(self, node: str, role: NodeRole, at: float) -> NodeStory:
        story = self._find_node(node)
        if story.role != role:
            story.role, story.since = role, at
        return story

    def _find_node(self, node: str) -> NodeStory:
        return self.nodes.setdefault(node, NodeStory(node=node))
