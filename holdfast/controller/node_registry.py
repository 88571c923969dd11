"""The registry of nodes: what each has reported about itself, when it last sent a message, and its part in the job."""

from collections.abc import Collection

from holdfast.controller.node_links import NodeLinks
from holdfast.core.decide.job_view import JobView
from holdfast.core.detect.silence import SilenceDetector, SilenceLimits
from holdfast.core.snapshots.checkpoint_reports import StorageWatch
from holdfast.model.detector_alarm import Alarm
from holdfast.model.job_and_seats import Seat
from holdfast.model.node_errands import Done
from holdfast.model.observation import Beat
from holdfast.model.state_copy import Address, Copy
from holdfast.wire.agent_messages import Hello

_RECONNECT_S = 5.0  # agents find a restarted controller within this
_SOURCES = 4  # of losses; a job has one


class NodeRegistry:
    """Owns what the controller knows about nodes. Other parts read it, and change it only through its methods."""

    def __init__(self, limits: SilenceLimits, view: JobView, links: NodeLinks) -> None:
        self.hosts: dict[str, str] = {}
        self.keepers: dict[str, Address] = {}  # where nodes are asked for the snapshots that they keep
        self.copies: dict[str, tuple[Copy, ...]] = {}  # snapshots that nodes said they hold
        self.beats: dict[str, Beat] = {}  # the newest of each node, for people
        self.stored = -1  # newest checkpoint of the line that the job is on
        self.storage = StorageWatch()
        self.made_up = False  # optimizers count one step more than were made, since the job's first one
        self.replayable: str | None = None  # told by the script; "": not at all; None: not heard yet
        self.orphaned = 0  # a generation that the journal has lost: what it left on nodes may be gone on from
        self.imports: tuple[str, ...] = ()  # what the zygote of rank 0's node has for the script
        self._loss_sources: set[str] = set()
        self.knows_losses = False  # some rank's losses were reported, or are read where they are logged
        self._view = view
        self._links = links
        self._silence = SilenceDetector(limits)
        self._left: set[str] = set()  # told to leave: their silence is no news
        self._local: set[str] = set()  # nodes that called by the socket of this host
        self._seats: tuple[Seat, ...] = ()
        self._seated: dict[str, Seat] = {}  # these by node

    # --- news of nodes -----------------------------------------------------------------------------------------

    def record_hello(self, now: float, hello: Hello) -> None:
        self._left.discard(hello.node)
        self._silence.on_message(now, hello.node)
        self.keepers[hello.node] = hello.keeper
        self.hosts[hello.node] = hello.host
        if self.is_seated(hello.node):  # others may hold steps of a line that the job has left
            self.copies[hello.node] = hello.copies
        elif disks := tuple(copy for copy in hello.copies if copy.disk):  # these tell of which line they are
            self.copies[hello.node] = disks

    def record_origin(self, node: str, *, local: bool) -> None:
        """Record whether the node connected through this host's unix socket."""
        (self._local.add if local else self._local.discard)(node)

    def record_alive(self, now: float, node: str) -> None:
        if node not in self._left:
            self._silence.on_message(now, node)

    def record_beat(self, now: float, beat: Beat) -> None:
        self.record_alive(now, beat.node)
        self.beats[beat.node] = beat
        if beat.generation == self._view.generation:
            self.stored = max(self.stored, beat.stored)
            self.knows_losses |= beat.loss is not None or bool(beat.loss_source)
            self.made_up = beat.made_up if beat.step >= 0 else self.made_up
            if self.owns_rank(beat.node, 0):  # whose keeper tells what is missed
                self.storage.on_restored(beat.generation, beat.restored)
            self.record_stored(now, beat)

    def record_stored(self, now: float, told: Beat | Done) -> None:
        """Record what a node of the running generation reports about checkpoints."""
        at = min(told.stored_at or now, now)
        self.storage.on_told(at, self._view.generation, told.stored, told.missed)

    def record_loss_source(self, source: str) -> bool:
        """Record a source of losses. Return whether to announce it, which is so for the first few sources."""
        if not source or source in self._loss_sources or len(self._loss_sources) >= _SOURCES:
            return False
        self._loss_sources.add(source)
        return True

    def record_replayable(self, replayable: str) -> None:
        """Record whether the script can repeat its work: "seeded", "unseeded", or "" if it cannot."""
        self.replayable = replayable

    def record_imports(self, modules: tuple[str, ...]) -> None:
        """Record the script's modules in rank 0's zygote; () if no rank can be forked with these modules."""
        self.imports = modules

    def record_orphaned(self, generation: int) -> None:
        self.orphaned = generation

    def holds_copies(self, node: str) -> bool:
        return bool(self.copies.get(node))

    def record_copies(self, node: str, copies: tuple[Copy, ...]) -> None:
        self.copies[node] = copies

    def record_silence(self, node: str) -> None:
        """Record that a node fell silent or is gone: forget its copies and its last beat."""
        self._silence.forget_node(node)
        self.copies.pop(node, None)
        self.beats.pop(node, None)

    def record_departure(self, node: str) -> None:
        """Record that a node was told to leave. Its silence then raises no alarm, and its copies are forgotten."""
        self._left.add(node)
        self._silence.forget_node(node)
        self.copies.pop(node, None)
        self.keepers.pop(node, None)
        self.beats.pop(node, None)

    def keep_copies_on(self, nodes: Collection[str]) -> None:
        """Forget all copies except those on these nodes."""
        self.copies = {node: held for node, held in self.copies.items() if node in nodes}

    def drop_copies_after(self, step: int) -> None:
        """Forget copies of steps after `step`, because the job goes back to that step and makes new ones."""
        self.copies = {node: tuple(c for c in held if c.step <= step) for node, held in self.copies.items()}

    def lower_stored(self, step: int) -> None:
        """Ignore checkpoints of steps after `step`, because the job goes back to that step and makes new ones."""
        self.stored = min(self.stored, step)

    def expect_nodes(self, now: float, nodes: Collection[str], alone_since: float) -> None:
        """Give the nodes of an earlier controller time to reconnect before they count as silent. `alone_since` is when
        the earlier controller was last alive; 0 if unknown. If it was alive until recently, or if that is unknown, the
        nodes also get the usual limit of silence."""
        looked = bool(alone_since) and now > alone_since + _RECONNECT_S
        heard_at = now + max(0.0, _RECONNECT_S - (self._silence.limits.silence_s if looked else 0.0))
        for node in nodes:
            self._silence.on_message(heard_at, node)

    # --- questions ---------------------------------------------------------------------------------------------

    def overdue_alarms(self, now: float) -> tuple[Alarm, ...]:
        """Return alarms for nodes that became silent; each node is reported once."""
        return self._silence.overdue_alarms(now)

    def misses_link(self) -> bool:
        """Return whether there is a node without a link that does not count as silent yet."""
        return any(not self._links.is_linked(node) for node in self._silence.watched_nodes)

    def heard_at(self, node: str) -> float | None:
        """Return when a node last sent a message; None if its silence is not watched."""
        return self._silence.heard_at(node)

    def may_accuse(self, node: str, suspects: Collection[str]) -> bool:
        """Return whether a node may accuse these suspects. A node may accuse itself. If it connected through this
        host's unix socket, it may accuse any node of this host, because one agent may report for all of them."""
        return set(suspects) <= ({node} | self._local if node in self._local else {node})

    def may_raise_alarm(self, node: str, alarm: Alarm) -> bool:
        """Return whether a node may raise this alarm. A node of this host may raise any alarm about nodes that it may
        accuse. A node of another host may accuse only itself. Without a seat, its alarm must not be about the running
        generation. With a seat, it may name only its own ranks of the running generation."""
        if not self.may_accuse(node, alarm.suspects):
            return False
        seat, running = self._seat_of(node), self._view.generation
        if node in self._local or (alarm.suspects and not 0 < alarm.generation == running):
            return True
        return seat is not None and (alarm.generation != running or all(map(seat.has_rank, alarm.ranks)))

    @property
    def local_nodes(self) -> Collection[str]:
        """Nodes that connected through this host's unix socket."""
        return self._local

    def owns_rank(self, node: str, rank: int) -> bool:
        seat = self._seat_of(node)
        return seat is not None and seat.has_rank(rank)

    def has_seat(self, node: str) -> bool:
        """Return whether a node has a seat in this generation, even if it was evicted or is silent."""
        return self._seat_of(node) is not None

    def is_seated(self, node: str) -> bool:
        return self.has_seat(node) and node not in self.lost_nodes()

    def has_left(self, node: str) -> bool:
        """Return whether this node was told to leave for good, so that its messages are ignored. Nodes of the
        controller's own host are exempt. So are nodes that may return."""
        return node in self._left and node not in self._local and not self._view.may_return(node)

    def _seat_of(self, node: str) -> Seat | None:
        if self._seats is not self._view.seats:  # asked at every beat of every node
            self._seats = self._view.seats
            self._seated = {seat.node: seat for seat in self._seats}
        return self._seated.get(node)

    def lost_nodes(self) -> set[str]:
        """Return the nodes that have left, and the nodes that are about to leave because they fell silent."""
        return {*self._view.gone, *self._view.silent_nodes}

    def present_nodes(self) -> tuple[str, ...]:
        """Return the nodes that are linked or are expected to link soon, as after a restart of the controller. A node
        that was told to leave does not count: it answers no more, even if its link lasts a little longer."""
        awaited = {seat.node for seat in self._view.seats} - self.lost_nodes()
        present = {*self._links.linked_nodes, *awaited} - self._left
        return tuple(sorted({*present, *self._view.pool, *self._view.under_probe}))

    def ranks_beside(self, node: str) -> tuple[int, ...]:
        """Return the ranks of other present nodes on this node's host, or of nodes whose host is unknown."""
        host, lost = self.hosts.get(node), self.lost_nodes()
        beside = [s for s in self._view.seats if s.node not in (node, *lost) and self.hosts.get(s.node, host) == host]
        return tuple(rank for seat in beside for rank in seat.ranks)

    def has_heard_host(self, node: str) -> bool:
        """Return whether this controller has received a beat from every present node on this node's host. Nodes whose
        host is unknown count as well. Any of these nodes may be the one that reports the host's links."""
        host = self.hosts.get(node)
        return all(one in self.beats for one in self.present_nodes() if self.hosts.get(one, host) == host)

    def known_nodes(self) -> set[str]:
        """Return the nodes that the decider has heard of."""
        view = self._view
        return {*(seat.node for seat in view.seats), *view.pool, *view.coming, *view.gone, *view.under_probe}
