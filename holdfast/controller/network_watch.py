"""Watches the network between nodes: which nodes reach which, the traffic of links, and whether links are quiet."""

from collections.abc import Callable

import msgspec

from holdfast.config import Settings
from holdfast.controller.node_links import NodeLinks
from holdfast.controller.node_registry import NodeRegistry
from holdfast.controller.stack_tracing import StackTracing
from holdfast.core.decide.job_view import JobView
from holdfast.core.detect.link_traffic import QuietLinks
from holdfast.core.detect.reachability import ReachDetector, choose_peers
from holdfast.core.detect.switch_loss import SwitchDetector
from holdfast.core.diagnose.blocking_ranks import find_blocking
from holdfast.core.diagnose.stack_outline import keep_stacks
from holdfast.core.incident.alarm_rate_limit import cap_stance
from holdfast.model.action import Launch
from holdfast.model.decider_events import LinksDown, LinksUp
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.job_phase import Phase
from holdfast.model.observation import Beat, LinkTraffic, Reach, StrainKind
from holdfast.wire.agent_messages import ReachRequest

_LOOK_S = 2.0  # for all nodes to look at their processes
_ANSWER_S = 5.0  # for all nodes to have tried their peers
_STALE = 3  # readings that a machine may leave out before nothing is known of it


class NetworkWatch:
    def __init__(
        self,
        settings: Settings,
        view: JobView,
        registry: NodeRegistry,
        *,
        links: NodeLinks,
        tracing: StackTracing,
        now: Callable[[], float],
    ) -> None:
        self._every_s = settings.health.network_s
        self._stance = cap_stance(Stance.NOTIFY, settings.health.stance)
        self._view, self._registry = view, registry
        self._links, self._tracing, self._now = links, tracing, now
        self._traffic: dict[str, tuple[float, tuple[LinkTraffic, ...]]] = {}  # by node: when it was told, and what
        self._reach = ReachDetector()
        self._switch = SwitchDetector(self._every_s)
        self._quiet = QuietLinks(settings.hang.quiet_s, _STALE * self._every_s)
        self._asked_at, self._judged = 0.0, True
        self._looking = False

    def on_launch(self, now: float, launch: Launch) -> None:
        self._reach.on_launch()
        self._switch.on_launch()
        self._quiet.on_launch(now)
        self._asked_at, self._judged = now, True

    def on_traffic(self, now: float, node: str, links: tuple[LinkTraffic, ...]) -> None:
        self._traffic[node] = now, links
        self._quiet.on_traffic(now, self._machine_of(node), links)

    def on_beat(self, beat: Beat) -> LinksDown | LinksUp | None:
        """Record the links that a beat reports; return an event if a node's links went down or are up again."""
        if not beat.links_read:  # nothing is known anew
            return None
        self._switch.on_beat(beat)
        known = self._view.without_links
        if beat.node in known and not self._switch.is_cut(beat.node) and self._registry.has_heard_host(beat.node):
            return LinksUp(nodes=(beat.node,))
        cut = {node for strain in beat.strains if strain.kind is StrainKind.CUT for node in strain.nodes}
        if cut <= known or not self._registry.may_accuse(beat.node, cut):
            return None
        if all(seat.node in cut for seat in self._view.seats):  # one machine alone needs no link
            return None
        return LinksDown(nodes=tuple(sorted(cut)))

    def judge_alarm(self, alarm: Alarm) -> Alarm | None:
        """Return the alarm to raise for one node's alarm. If several machines lost links at that time, return one alarm
        about all of them, or None if that one was already raised. Otherwise return the node's alarm unchanged."""
        return self._switch.judge_alarm(alarm, self._view.generation)

    def forget_node(self, node: str) -> None:
        self._switch.forget_node(node)
        self._traffic.pop(node, None)

    def list_traffic(self, now: float) -> dict[str, tuple[LinkTraffic, ...]]:
        """Return by node the traffic that nodes reported of their machines' links, without outdated reports."""
        return {node: links for node, (at, links) in self._traffic.items() if now <= at + _STALE * self._every_s}

    def on_reach(self, reach: Reach) -> None:
        """Store which nodes a node reached; `check_round` judges the answers of all nodes together."""
        if not self._is_under_way() or not self._registry.is_seated(reach.node):
            return
        is_seated = self._registry.is_seated
        reached, missed = (tuple(filter(is_seated, nodes)) for nodes in (reach.reached, reach.missed))
        self._reach.on_reach(msgspec.structs.replace(reach, reached=reached, missed=missed))

    def check_round(self, now: float) -> Alarm | None:
        """Judge a round of answers once all have had time to arrive; return an alarm if nodes have been cut off."""
        if self._judged or now < self._asked_at + min(_ANSWER_S, self._every_s / 2) or not self._is_under_way():
            return None
        self._judged = True
        return self._reach.check_islands(now, self._view.generation, self._stance)

    def ask_nodes(self, now: float) -> None:
        """At intervals, ask every node which other nodes it reaches, if the job runs on several hosts."""
        if now < self._asked_at + self._every_s or not self._is_under_way():
            return
        self._asked_at, self._judged = now, False
        keepers = self._registry.keepers
        seated = [seat.node for seat in self._view.seats if keepers.get(seat.node, ("", 0))[1]]
        for node, peers in choose_peers(seated, {node: self._machine_of(node) for node in seated}).items():
            if peers:
                self._links.send_message(node, ReachRequest(peers={peer: keepers[peer] for peer in peers}))

    def should_look(self, now: float) -> bool:
        """Return whether links have been quiet for so long that the ranks' stacks should be taken."""
        return bool(not self._looking and self._is_under_way() and self._lasting_quiet_s(now))

    async def look_at_ranks(self) -> Alarm | None:
        """Take the stacks of all ranks; return an alarm about quiet links, with ranks that block but no suspects."""
        began_at, generation, seats = self._now(), self._view.generation, self._view.seats
        lasts_s = self._lasting_quiet_s(began_at)
        self._quiet.on_look(began_at)
        self._looking = True
        try:
            traces = await self._tracing.take_traces(_LOOK_S, nodes=tuple(seat.node for seat in seats))
        finally:
            self._looking = False
        if self._view.generation != generation or not self._is_under_way():
            return None
        found = find_blocking(traces, seats, self._view.mesh)
        alarm = Alarm(
            kind=Kind.HEALTH,
            at=self._now(),
            suspects=(),
            ranks=found.ranks,
            generation=generation,
            klass="process_hang",
            reason=f"the links of all hosts have been quiet for {lasts_s:.0f} s, and no step was made; "
            + (found.reason or "the stacks of the ranks name nobody"),
            signature="quiet links",
            stance=self._stance,
        )
        return keep_stacks(alarm, traces, found.ranks)

    def _lasting_quiet_s(self, now: float) -> float:
        nodes = [seat.node for seat in self._view.seats]
        beats = [beat for node in nodes if (beat := self._registry.beats.get(node)) and beat.step >= 0]
        stepped_at = max((beat.at for beat in beats if beat.generation == self._view.generation), default=0.0)
        return self._quiet.quiet_s(now, {self._machine_of(node) for node in nodes}, stepped_at)

    def _machine_of(self, node: str) -> str:
        """Return a name for a node's machine: its keeper's address, or its host if the keeper has only a path."""
        place, port = self._registry.keepers.get(node, ("", 0))
        return place if port else self._registry.hosts.get(node, node)

    def _is_under_way(self) -> bool:
        return self._view.phase in (Phase.STARTING, Phase.TRAINING) and not self._view.some_ended
