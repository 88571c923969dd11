"""Chooses which node copies snapshots to which, and sends every node its aim: the step to pin and copy next."""

from collections.abc import Callable, Collection

import msgspec

from holdfast.controller.access.node_certificate_serials import NodeCertificates
from holdfast.controller.node_links import NodeLinks
from holdfast.controller.node_registry import NodeRegistry
from holdfast.core.snapshots.recovery_floor_coordination import RecoveryFloor
from holdfast.model.copy_aim import Aim
from holdfast.model.job_and_seats import Dims, Seat
from holdfast.model.observation import Beat

# 2,000 new nodes that join one after the other would each cost 2,000 lists. Who leaves is told of at once, and so is
# everybody before a launch.
_PEERS_S = 10.0


class SnapshotAims:
    def __init__(
        self,
        floor: RecoveryFloor,
        registry: NodeRegistry,
        links: NodeLinks,
        certificates: NodeCertificates,
        say: Callable[[str], None],
    ) -> None:
        self.floor = floor
        self._registry = registry
        self._links = links
        self._certificates = certificates
        self._say = say
        self._exposed: tuple[str, ...] = ()
        self._is_behind = self._is_lone = False
        self._peers_at = 0.0  # when certificates that count were last told without need

    def place_copies(self, generation: int, seats: tuple[Seat, ...], mesh: Dims) -> None:
        """Choose which node keeps copies of which node's snapshots, and warn of nodes without copies."""
        exposed = self.floor.on_launch(generation, seats, mesh)
        self.send_peers()  # a new node's first requests to others come with the launch
        self._is_behind = self._is_lone = False  # nothing is known of the new generation's copies yet
        if exposed != self._exposed:
            self._exposed = exposed
            for sentence in exposed:
                self._say(sentence)

    def on_beat(self, now: float, beat: Beat) -> None:
        if self.floor.on_beat(now, beat):
            self.send_aims()
        self._say_pace()

    def tick(self, now: float) -> None:
        if self.floor.tick(now):
            self.send_aims()
        if now >= self._peers_at + _PEERS_S:
            self._peers_at = now
            self.send_peers()
        self._say_pace()

    def _say_pace(self) -> None:
        """Say once that copies do not keep up with the job, and once that they keep up again. Say the same of second
        copies that cannot be kept."""
        if bool(self.floor.behind) != self._is_behind:
            self._is_behind = not self._is_behind
            self._say(self.floor.behind or f"copies on peers keep up again: they are of step {self.floor.floor}")
        if bool(self.floor.lone) != self._is_lone:
            self._is_lone = not self._is_lone
            self._say(self.floor.lone or f"all states have two copies again, of step {self.floor.floor}")

    def on_hello(self, node: str) -> None:
        """Send an aim to a node that has just linked, and to each node whose aim contains the address of that node's
        keeper. All other nodes get no aim, or the number of messages would be quadratic."""
        kept = (*self.floor.peers.items(), *self.floor.seconds.items())
        peers = {own for own, peer in kept if peer == node}
        halved = {own for own, halves in self.floor.halves.items() if any(half.keeper == node for half in halves)}
        self.send_aims({node, *peers, *halved} & self.floor.nodes)

    def on_departure(self, node: str) -> None:
        """When a node with a certificate leaves, tell all nodes to accept that certificate no longer."""
        if self._certificates.serial_of(node) is not None:
            self.send_peers()

    def send_peers(self) -> None:
        """Tell each linked node whose certificates count, if that has changed since it was told."""
        if peers := self._certificates.admitted_peers():
            self._links.send_peers(peers)

    def aim_of(self, node: str) -> Aim:
        aim, at = self.floor.aim_for(node), self._registry.keepers
        halves = tuple(msgspec.structs.replace(half, keeper_at=at.get(half.keeper, ("", 0))) for half in aim.halves)
        peer_at, second_at = at.get(aim.peer, ("", 0)), at.get(aim.second, ("", 0))
        return msgspec.structs.replace(aim, peer_at=peer_at, second_at=second_at, halves=halves)

    def send_aims(self, nodes: Collection[str] | None = None) -> None:
        """Send aims to these nodes, or to all if `nodes` is None."""
        for node in sorted(self.floor.nodes if nodes is None else nodes):
            self._links.send_aim(node, self.aim_of(node))
