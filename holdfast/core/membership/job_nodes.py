"""The nodes of a job: which are seated, which wait as standbys, and which leave."""

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from holdfast.core.membership.awaited_network_links import LostLinks
from holdfast.core.membership.seating import growth_unit, next_seats
from holdfast.core.membership.standbys import Standbys
from holdfast.core.membership.unchecked_nodes import UncheckedNodes, choose_unchecked
from holdfast.core.snapshots.node_eviction_bonds import Bonds, copy_bonds
from holdfast.model.action import Action, Say
from holdfast.model.decider_events import Ready
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Kind
from holdfast.model.job_and_seats import Dims, Job, Seat


class JobNodes:
    """The seated nodes and the standbys, as part of the job's state. Methods return the actions that they require."""

    def __init__(self, job: Job, limits: Limits, ids: Iterator[int]) -> None:
        self.job = job
        self.standbys = Standbys(job, limits, ids)
        self.pool = self.standbys.pool
        self.links = LostLinks()
        self.reported_mesh: Dims = ()
        self.seats: tuple[Seat, ...] = ()
        self.out: set[str] = set()  # seated, but not in the next generation
        self.ended: set[str] = set()  # seated, and all of their ranks have ended well
        self.seated: frozenset[str] = frozenset()
        self.back: dict[str, Ready] = {}  # silent ones that are back before they could be evicted
        self.unstopped: set[str] = set()  # whose ranks could not be ended
        self._line: frozenset[str] = frozenset()  # who was seated when the job last made a step

    @property
    def mesh(self) -> Dims:
        """Return the parallel groups that the user gave or, if there are none, those that the script has reported."""
        return self.job.mesh or self.reported_mesh

    @property
    def active(self) -> set[str]:
        return set(self.seated - self.out)

    @property
    def active_seats(self) -> tuple[Seat, ...]:
        """Return the seats whose nodes are in the next generation too, in the order of their ranks."""
        return tuple(seat for seat in self.seats if seat.node not in self.out)

    def is_active(self, node: str) -> bool:
        return node in self.seated and node not in self.out

    @property
    def usable_pool(self) -> Mapping[str, Ready]:
        """Return the standbys that can get ranks: all but those whose links are down."""
        down = self.links.nodes
        return {node: ready for node, ready in self.pool.items() if node not in down} if down else self.pool

    @property
    def node_count(self) -> int:
        """Return how many nodes can get ranks in the next generation."""
        return len(self.seats) - len(self.out) + len(self.usable_pool)

    @property
    def replica_nodes(self) -> int:
        """Return by how many nodes the job grows or shrinks: those of one replica if the mesh is known, else one."""
        some = self.seats[0] if self.seats else next(iter(self.pool.values()), None)
        return growth_unit(self.mesh, some.nproc) if some else 1

    @property
    def fewest_nodes(self) -> int:
        """Return on how few nodes the job can go on: as many as the user wants at least, as whole replicas."""
        unit = self.replica_nodes
        return min(self.job.max_nodes, -(-self.job.min_nodes // unit) * unit)

    @property
    def waits_in_queue(self) -> bool:
        """Return whether the job has too few nodes to begin, but enough with those in the fleet's queue."""
        queued, coming = len(self.standbys.queued), len(self.standbys.coming)
        have = self.node_count + len(self.standbys.checking) + coming - queued
        return have < self.fewest_nodes <= have + queued

    @property
    def waits_for_checks(self) -> bool:
        """Return whether the job has too few nodes to begin, and would have enough with those that are being checked
        now."""
        new = {*self.standbys.checking.values()} - self.standbys.pool.keys()
        return self.node_count < self.fewest_nodes <= self.node_count + len(new)

    def choose_unchecked(self, stood_since: float) -> UncheckedNodes | None:
        """Return which nodes a job that has stood since this time gets ranks on before their checks have ended; None if
        it needs none, or no such nodes would do."""
        begun, down = self.standbys.awaiting_checks, self.links.nodes
        lacking = self.fewest_nodes - self.node_count if begun else 0
        return choose_unchecked({node: at for node, at in begun.items() if node not in down}, lacking, stood_since)

    def take_unchecked(self, now: float, stood_since: float) -> tuple[Say, ...]:
        """Make nodes standbys before their checks have ended, if the job has stood for them for too long."""
        due = self.choose_unchecked(stood_since)
        return self.standbys.take_unchecked(due.nodes, now - stood_since) if due and due.at <= now else ()

    @property
    def wait_causes(self) -> tuple[str, ...]:
        """Return why nodes are unusable or do not come, for the message of a job that waits for nodes."""
        cut_off = ", ".join(sorted(self.pool.keys() & self.links.nodes))
        said = {"without a link": cut_off, "the fleet": self.standbys.fleet.last_word}
        told = [f"{what}: {why}" for what, why in said.items() if why]
        return (*told, *filter(None, [self.standbys.faults.wait_cause]))

    @property
    def wait_clause(self) -> str:
        """Return a clause about unusable nodes for the message of a job that waits for nodes; "" if there are none."""
        return "".join(f"; {cause}" for cause in self.wait_causes)

    @property
    def hosts(self) -> dict[str, str]:
        """Return the host of each node that has ever reported."""
        return self.standbys.hosts

    def on_step(self) -> None:
        """Record that the seated nodes hold the job's lineage, because they have made a step."""
        self._line = self.seated

    def set_lineage(self, nodes: Iterable[str]) -> None:
        """Set which nodes hold the job's lineage. If `nodes` is empty, no seated node holds it."""
        self._line = frozenset(nodes) or frozenset({""})

    @property
    def astray(self) -> tuple[str, ...]:
        """Return the seated nodes that were away at the last step. Their state may belong to an abandoned lineage."""
        return tuple(sorted(self.seated - self._line)) if self._line else ()

    def can_do_without(self, nodes: Iterable[str]) -> bool:
        left = self.active.difference(nodes)
        return bool(left) and (self.job.can_acquire or len(left) + len(self.usable_pool) >= self.fewest_nodes)

    def nodes_of_ranks(self, ranks: Collection[int]) -> tuple[str, ...]:
        """Return the seated nodes that run at least one of these ranks."""
        return tuple(seat.node for seat in self.seats if any(seat.has_rank(rank) for rank in ranks))

    def copy_bonds(self, *, lone: bool) -> Bonds:
        """Return, for each seated node, the sets of nodes that must not all leave together with it. `lone` tells that
        some second copies are not there."""
        return copy_bonds(self.seats, self.mesh, parity=self.job.parity, copies=self.job.copies, lone=lone)

    def evict_nodes(
        self,
        nodes: Iterable[str],
        silent: Collection[str],
        generation: int,
        *,
        examine: bool,
        drained: Collection[str] = (),
    ) -> tuple[list[str], list[Action]]:
        """Evict the active nodes among `nodes`. Return the evicted nodes, and the actions that their eviction requires.
        With `examine`, evicted nodes that still answer are probed."""
        leaving = sorted(self.active.intersection(nodes))
        actions: list[Action] = []
        self.out.update(leaving)
        for node in leaving:
            kind, answers = Kind.SILENCE if node in silent else Kind.CRASH, node not in self.unstopped
            released = self.standbys.evict_node(
                node, kind, generation, examine=examine and answers, drained=node in drained
            )
            actions += released
            if not released and node in self.back:
                actions += self.standbys.on_ready(self.back[node], 0)
        return leaving, actions

    def forget_returned(self, nodes: Iterable[str]) -> None:
        gone = set(nodes)
        self.back = {node: ready for node, ready in self.back.items() if node not in gone}

    def propose_seats(self, *, may_shrink: bool) -> tuple[Seat, ...] | None:
        """Return the seats of a generation launched now; None while nodes are missing."""
        if self.node_count < (self.fewest_nodes if may_shrink else self.job.max_nodes):
            return None  # without looking at thousands of them for each one that comes
        seats = next_seats(self.job, self.seats, self.out, self.usable_pool, may_shrink=may_shrink, mesh=self.mesh)
        return seats and tuple(self._place_seat(seat) for seat in seats)

    def _place_seat(self, seat: Seat) -> Seat:
        near = self.standbys.fleet.near(seat.node)
        return seat if seat.near == near else msgspec.structs.replace(seat, near=near)

    def shared_place(self, nodes: Collection[str]) -> str:
        """Return the narrowest unit that these seated nodes share, such as a switch or rack; "" if none is known."""
        places = [seat.near for seat in self.seats if seat.node in nodes]
        shared = [names[0] for names in zip(*places, strict=False) if len(set(names)) == 1]
        return shared[-1] if shared else ""

    def take_seats(self, seats: tuple[Seat, ...]) -> tuple[str, ...]:
        """Make these the current seats and return the newly admitted nodes. Nodes that are left over, as they are too
        few for a replica, become standbys."""
        kept = self.active
        admitted = tuple(seat.node for seat in seats if seat.node not in kept)
        for node in admitted:
            self.standbys.admit_node(node)
        for node in sorted(kept.difference(seat.node for seat in seats)):
            self.standbys.unseat_node(node)
        for seat in seats:
            self.standbys.fleet.doubt_gone(seat.node)
        self.seats, self.seated = seats, frozenset(seat.node for seat in seats)
        self.out, self.ended = set(), set()
        return admitted

    def may_grow(self) -> bool:
        """Return whether the job has fewer nodes than wanted, and enough standbys for one more replica of the model."""
        missing, usable = self.job.max_nodes - len(self.seats), len(self.usable_pool)
        if missing <= 0 or not usable:
            return False
        return min(missing, usable) >= self.replica_nodes
