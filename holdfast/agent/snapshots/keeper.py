"""The keeper: keeps snapshots after their ranks have ended, hands them back to new ranks, and writes checkpoints.

It runs in the agent, without torch. Ranks write into memory that the holder owns. The keeper reads that memory, pins
what it reads, and answers a rank's two questions: where to put snapshots, and which state to go on from.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.agent.snapshots.arena_table import ArenaTable, OwnArena
from holdfast.agent.snapshots.checkpoint_writer import CheckpointWriter
from holdfast.agent.snapshots.copy_pacer import CopyPacer
from holdfast.agent.snapshots.departure_writer import FinalWriter
from holdfast.agent.snapshots.held_peer_copies import HeldPeerCopies
from holdfast.agent.snapshots.keeper_identity import KeeperIdentity
from holdfast.agent.snapshots.keeper_interfaces import (
    KeeperLinks,
    KeeperNotes,
    KeeperPorts,
    StateDisk,
    WaitForLoop,
)
from holdfast.agent.snapshots.other_size_arenas import OtherSizeArenas
from holdfast.agent.snapshots.parcel_transport import ParcelTransport
from holdfast.agent.snapshots.peer_arenas import PREFIX, PeerMemory
from holdfast.agent.snapshots.peer_sender import PeerSender
from holdfast.agent.snapshots.rank_request_notes import RequestNotes
from holdfast.agent.snapshots.recut_fetch import OwnShelf
from holdfast.agent.snapshots.recut_spans import RecutSpans
from holdfast.agent.snapshots.recut_states import RecutStates
from holdfast.agent.snapshots.replica_hashes import ReplicaHasher
from holdfast.agent.snapshots.state_fetch import StateFetch
from holdfast.agent.snapshots.step_gap_watch import StepGapWatch
from holdfast.agent.system.snapshot_memory import SnapshotBudget
from holdfast.checkpoint.arena import POISONED, VERIFIED, Arena, ArenaError, SealedSnapshot, SnapshotSlot
from holdfast.checkpoint.arena_header import arena_bytes
from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.checkpoint.keeper_client import make_want
from holdfast.checkpoint.manifest import Author
from holdfast.checkpoint.peer_transport import LinkError, TransportError
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.core.snapshots.gap_pacing import PacingChoice
from holdfast.core.snapshots.keeper_launch_state import KeeperLaunch, read_launch
from holdfast.core.snapshots.slot_pin_limit import FLOOR_SLOTS
from holdfast.decoding import from_json
from holdfast.model.copy_aim import Aim
from holdfast.model.node_errands import LaunchHere, Leave
from holdfast.model.observation import Beat
from holdfast.model.restore_sources import Source
from holdfast.model.state_copy import Address, Copy
from holdfast.wire import rank_keeper_messages
from holdfast.wire.credentials.admitted_peers import AdmittedPeers
from holdfast.wire.holder_messages import KeptArena
from holdfast.wire.rank_keeper_messages import ArenaGrant as ArenaAt
from holdfast.wire.rank_keeper_messages import ArenaRequest, KeeperRefusal, StateGrant, StateRequest

_IDLE_S = 0.2  # between looks while no rank has asked for memory, at least
_SLOTS = 4  # for a rank that will ask for as many at most
_CHECKING = 0.05  # of a core is at most spent on checksums of snapshots
_LAUNCH = "launch.json"
_REACH_S, _AGAIN_S = 10.0, 0.5  # how long, and how often, a keeper that cannot be reached is asked for a state

T = TypeVar("T")


class KeeperParts(NamedTuple):
    """The memory, files, connections and writers that a keeper is put together from."""

    arenas: ArenaTable
    wait_for_loop: WaitForLoop  # from a thread, until an arena is made
    notes: KeeperNotes
    links: KeeperLinks
    disk: StateDisk
    persisting: CheckpointWriter


class Keeper:
    def __init__(
        self, place: KeeperIdentity, ports: KeeperPorts, parts: KeeperParts, budget: SnapshotBudget | None = None
    ) -> None:
        self.place = place
        self.node = place.node
        self._ports, self._budget = ports, budget
        self._notes, self._links = parts.notes, parts.links
        self._arenas, self.disk, self._persisting = parts.arenas, parts.disk, parts.persisting
        to_disk, by_gaps = bool(place.disk.path), place.limits.pacing is not PacingChoice.DUTY
        self.gaps = StepGapWatch(ports.network, ports.clock, lambda: by_gaps and self.backing.has_peer)
        pacer = CopyPacer(place.limits, self.gaps)
        transport = ParcelTransport(self._arenas, self._notes, self._links, pacer)
        self.backing = PeerSender(
            self._arenas, transport, ports.clock, ports.say, ports.report_progress, to_disk=to_disk
        )
        self.parting = FinalWriter(self._arenas, self._persisting, self.disk, ports)
        self.hashing = ReplicaHasher(
            self._arenas, self._notes, place.replica, ports.report_marks, self.backing.next_seqs
        )
        for_peers = PeerMemory(ports.make_arena, parts.wait_for_loop)
        self._shelf = HeldPeerCopies(self._notes, self._arenas, for_peers, self.disk, ports)
        self._launch = KeeperLaunch()
        self._requests = RequestNotes(self._notes, ports)
        self._aside = OtherSizeArenas(self._arenas, ports)
        self._spans = RecutSpans(self._notes)
        own = OwnShelf(self.node, self._shelf, self._notes)
        self._recuts = RecutStates(self._arenas, own, self._links, ports, self._fetch_patiently)
        self._seen: dict[int, tuple[tuple[int, int], ...]] = {}  # rank -> seq and flags of what was looked at last

    def adopt_arenas(self, kept: tuple[KeptArena, ...]) -> None:
        """Take over an earlier agent's arenas; read its launch and the ranks' arena requests from the notes."""
        errand: LaunchHere | None = None
        with contextlib.suppress(OSError, msgspec.DecodeError):
            errand = from_json(self._notes.read_note(_LAUNCH), LaunchHere)
        for one in kept:
            with contextlib.suppress(ArenaError):  # made, and never used
                self._adopt_arena(one, errand.world_size if errand and errand.restore.is_of_any_size else 0)
        if errand:
            self._begin_generation(errand)
            self._shelf.begin_launch(msgspec.structs.replace(self._launch, shared_step=sys.maxsize))  # of its own line
        for want in self._requests.read_requests():
            self._on_want(want)
        self._persisting.mark_recalled()

    def _adopt_arena(self, kept: KeptArena, world: int) -> None:
        if kept.name.startswith(PREFIX):
            self._shelf.adopt_arena(kept.name, Arena.open(kept.path))
        else:
            self._aside.adopt_arena(kept.name, kept.path, world)

    def _on_want(self, want: ArenaRequest) -> None:
        """Note a rank's arena request. If the rank is of this generation and has an arena, begin to serve it."""
        self._persisting.note_request(want)
        own = self._arenas.find_arena(want.rank)
        if want.generation != self._launch.generation or own is None:
            return
        if self._budget:
            self._budget.record_grant(want, own.arena.slots)
        self._persisting.on_want(want)
        self._seen.pop(want.rank, None)
        self.backing.on_want(want)
        self.hashing.on_want(want)

    def admit_peers(self, peers: AdmittedPeers) -> None:
        """Accept the keepers of these nodes and no others, also after a restart of this agent."""
        self._links.admit_peers(peers)

    @property
    def stored(self) -> int:
        """The step of the newest checkpoint that this node has published in this generation; -1 if there is none."""
        return self._persisting.stored

    @property
    def address(self) -> Address:
        """Where other keepers reach this one."""
        return self._links.address

    def list_copies(self) -> tuple[Copy, ...]:
        """Return all snapshots, copies and parities on this node that could be restored."""
        arenas = [own.arena for own in (*self._arenas.list_arenas(), *self._arenas.list_aside())]
        own = [self._describe_copy(arena, one, True) for arena in arenas for one in arena.list_sealed()]
        kept = (self._describe_copy(*found) for found in self._shelf.list_copies())
        in_memory = map(self._spans.complete_copy, (*own, *kept, *self._shelf.pairs.list_copies(self.node)))
        return (*in_memory, *self.disk.list_copies(self.node))

    @property
    def parity_step(self) -> int:
        """The newest step for which this node holds all parities that it should keep; -1 if there is none."""
        return self._shelf.pairs.newest_step(self.backing.ranks)

    def _describe_copy(self, arena: Arena, sealed: SealedSnapshot, whole: bool) -> Copy:
        return Copy(
            rank=arena.rank,
            step=sealed.step,
            node=self.node,
            layout=arena.layout.hex(),
            world=arena.world,
            whole=whole,
            verified=bool(sealed.flags & VERIFIED),
            poisoned=bool(sealed.flags & POISONED),
            generation=sealed.generation,
        )

    def complete_beat(self, beat: Beat) -> Beat:
        """Return the beat, completed with the progress of snapshots, copies and checkpoints."""
        return msgspec.structs.replace(
            beat,
            sealed=self.backing.newest_shared_step(),
            backed=self.backing.backed,
            absent=self.backing.absent,
            backing_s=self.backing.took_s,
            backing_rest_s=self.backing.pacer.rest_s,
            pacing=self.backing.pacer.describe(),
            kept=self.parity_step,
            stored=self.stored,
            stored_at=self._persisting.stored_at,
            missed=self._persisting.missed_checkpoint,
            disked=self.disk.written,
            disk_tried=self.disk.tried,
            verifies=self.backing.wants_verification(),
            compares=self.hashing.is_comparing,
        )

    def report_checkpoints(self) -> None:
        self._persisting.report_again()

    async def use_run(self, run: str) -> None:
        """Set the run whose states on this host's disk may be restored, and list those states."""
        await self.disk.use_run(run)

    def end_training(self) -> None:
        """Take note that this node's ranks are being ended."""
        self._persisting.end_training()

    async def leave_job(self, errand: Leave) -> None:
        """Before the node leaves, write the final states if time allows, and remove unneeded states from its disk."""
        await self.parting.leave_job(errand, self._launch.ranks)

    def begin_launch(self, errand: LaunchHere) -> str:
        """Begin a generation; drop all snapshots after the step that it resumes from. Return an error or "".

        The launch is written to disk, so that the next agent does not take an older launch for the newest. Snapshots
        are dropped even if writing fails: a node that leaves must not hand over states of an abandoned lineage.
        """
        self._begin_generation(errand)
        self._seen.clear()
        self._requests.begin_launch()
        self._shelf.begin_launch(self._launch)
        if errand.restore.is_of_any_size:
            self._arenas.set_aside(errand.world_size)
        self._arenas.take_back(errand.world_size)
        self._arenas.drop_left(self._launch)
        self.disk.remove_given_up(self._launch)
        try:
            # No keeper asks for the environment of a release, and this note stays after the end.
            bare = msgspec.structs.replace(errand, release=msgspec.structs.replace(errand.release, env={}))
            self._notes.write_note(_LAUNCH, msgspec.json.encode(bare))
        except OSError as e:
            return f"cannot write {e.filename or _LAUNCH}: {e.strerror}"
        return ""

    def _begin_generation(self, errand: LaunchHere) -> None:
        launch = self._launch = read_launch(errand)
        wanted = launch.restore.step if launch.restore.store else -1
        self._persisting.begin_generation(Author(launch.generation, launch.run), launch.restore.doubts, wanted)
        self.backing.begin_generation(launch.generation, len(launch.ranks), launch.shared_step)
        self.gaps.begin_generation(launch.generation, len(launch.ranks))
        self.hashing.begin_generation(launch.generation)
        self.disk.begin_generation(Author(launch.generation, launch.run))
        self.backing.set_aim(errand.aim)
        self._shelf.set_wards(errand.aim.wards)

    async def apply_aim(self, aim: Aim) -> None:
        """Pin the snapshots and copies that the aim names, and free the memory of copies that it does not need."""
        self.backing.set_aim(aim)
        if aim.generation == self._launch.generation:
            self._shelf.set_wards(aim.wards)
        if aim.floor >= 0 and aim.generation == self._launch.generation:
            for name in self._shelf.pin_floor(aim.floor):
                await self._ports.make_arena(name, 0)
            await self.disk.follow_aim(aim, self._launch.ranks)

    # --- what ranks ask ----------------------------------------------------------------------------------------

    async def serve(self) -> None:
        self._shelf.use_loop(asyncio.get_running_loop())
        await self._links.serve(self._answer_request, self._shelf)

    async def _answer_request(self, line: bytes) -> rank_keeper_messages.FromKeeper:
        try:
            asked = rank_keeper_messages.to_keeper(line)
        except msgspec.DecodeError as e:
            return KeeperRefusal(why=f"not a request of this version of holdfast: {e}")
        if why := self._launch.refuse_request(asked.generation):
            return KeeperRefusal(why=why)
        if isinstance(asked, ArenaRequest):
            return await self._grant_arena(asked)
        return await self._find_state(asked)

    async def _grant_arena(self, want: ArenaRequest) -> ArenaAt | KeeperRefusal:
        own = self._arenas.find_arena(want.rank)
        try:
            if own is None or not own.fits(want):
                own = await self._new_arena(want)
        except (OSError, ValueError, ArenaError) as e:
            return KeeperRefusal(why=f"no memory for snapshots: {e}")
        self._requests.note_request(want)
        self._on_want(want)
        return ArenaAt(path=own.path)

    async def _new_arena(self, want: ArenaRequest) -> OwnArena:
        """Make a rank's arena, with fewer slots if memory is short; raise ArenaError if there is not enough."""
        if self.place.disk.path:  # it reads a floor for long, and the next floors must not wait for it
            want = msgspec.structs.replace(want, slots=max(want.slots, FLOOR_SLOTS) + 1)
        slots = want.slots
        if self._budget:
            self._budget.on_aim(self.backing.aim)
            given = self._budget.grant_slots(want)
            if not given.slots:
                raise ArenaError(given.why)
            if given.why:
                self._ports.say(given.why)
            slots = given.slots
        size_bytes = arena_bytes(want.image_bytes, slots)
        path = await self._aside.make_memory(want.rank, self._launch.generation, size_bytes)
        layout, world = bytes.fromhex(want.layout), want.world
        arena = Arena.make(path, layout=layout, image_bytes=want.image_bytes, slots=slots, rank=want.rank, world=world)
        return self._arenas.put_arena(path, arena)

    async def _find_state(self, asked: StateRequest) -> StateGrant | KeeperRefusal:
        launch, source = self._launch, self._launch.find_source(asked.rank)
        if launch.restore.replicated:
            return await self._aside.find_replica(launch, asked.rank)
        if source is None:
            told = launch.restore
            doubted, stored = told.doubted, told.stored
            none = StateGrant(source="none", run=launch.run, doubts=told.doubts, stored=stored, doubted=doubted)
            return await self._recuts.find_state(launch, asked.rank, none) if told.cut_from else none
        if not source.own:
            return await self._fetch_state(source)
        if source.disk:
            return await self._disk_state(source)
        own = self._arenas.find_arena(asked.rank)
        if own is None:
            return KeeperRefusal(why=f"this node has no snapshot of rank {asked.rank} at step {launch.restore.step}")
        return await self._aside.verify_state(own, launch.restore.step)

    async def _disk_state(self, source: Source) -> StateGrant | KeeperRefusal:
        """Read a rank's state from this node's disk into its arena, and verify it."""
        launch, began_at = self._launch, self._ports.clock.monotonic()
        step, is_wanted = launch.restore.step, partial(launch.is_of_line, step=launch.restore.step)
        state = await asyncio.to_thread(self.disk.find_state, source.rank, "", step, is_wanted)
        if state is None:
            return KeeperRefusal(why=f"this disk has no state of rank {source.rank} at step {step}")
        try:
            own, slot = await self._begin_fetched(state.note.layout)
            await asyncio.to_thread(self.disk.read_image, state, slot.image)
        except (StorageError, OSError, ArenaError) as e:
            self._ports.say(str(e))
            return KeeperRefusal(why=str(e))
        slot.seal()
        if state.note.verified:
            own.arena.flag_slot(slot.index, VERIFIED)
        self._say_fetched(state.note.layout, "disk", began_at)
        return StateGrant(source="disk", step=step, arena=own.path, slot=slot.index)

    async def _begin_fetched(self, plan: ImageLayout) -> tuple[OwnArena, SnapshotSlot]:
        """Reserve an arena slot for a rank's state that is fetched from a disk or a peer. Raises ArenaError."""
        own = self._arenas.find_arena(plan.rank)
        if own is None or own.arena.layout != plan.digest:
            own = await self._new_arena(make_want(plan, _SLOTS, "", None))  # it has not asked for its memory yet
        slot = own.arena.begin_slot(self._launch.restore.step, self._launch.restore.maker)
        if slot is None:
            raise ArenaError(f"no slot is free for the state of rank {plan.rank}")
        return own, slot

    def _say_fetched(self, plan: ImageLayout, nodes: str, began_at: float) -> None:
        step, took_s = self._launch.restore.step, self._ports.clock.monotonic() - began_at
        size = f"{plan.image_bytes / 1e9:.3g} GB" if plan.image_bytes > 1e7 else f"{plan.image_bytes / 1e6:.2g} MB"
        self._ports.say(f"rank {plan.rank} got {size} of step {step} from {nodes} in {took_s:.2f} s")

    async def _fetch_state(self, source: Source) -> StateGrant | KeeperRefusal:
        """Fetch the state of a rank that ran on another node: keepers that hold it send it to an arena on this node."""
        launch, began_at = self._launch, self._ports.clock.monotonic()
        gathering = StateFetch(launch.restore, source.rank, self._links)
        try:
            plan = await self._fetch_patiently(gathering.fetch_layout)
            own, slot = await self._begin_fetched(plan)
            nodes = await self._fetch_patiently(partial(gathering.fill_image, plan, slot.image))
        except (TransportError, OSError, ArenaError) as e:
            self._ports.say(str(e))
            return KeeperRefusal(why=str(e), unfetched=not isinstance(e, ArenaError))
        slot.seal()
        self._say_fetched(plan, nodes, began_at)
        return StateGrant(
            source="disk" if source.disk else "peer", step=launch.restore.step, arena=own.path, slot=slot.index
        )

    async def _fetch_patiently(self, fetch: Callable[[], T]) -> T:
        """Run `fetch` in a thread and return its result. While no holder can be reached, try again for some time."""
        launch, until = self._launch, None
        while True:
            try:
                return await asyncio.to_thread(fetch)
            except LinkError as e:
                now = self._ports.clock.monotonic()
                if self._launch is not launch or (until is not None and now >= until):
                    raise
                if until is None:
                    until = now + _REACH_S
                    self._ports.say(f"{e}; trying again for {_REACH_S:g} s")
            await asyncio.sleep(_AGAIN_S)

    # --- watching ----------------------------------------------------------------------------------------------

    async def watch_snapshots(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._requests.try_again()
                await self._aside.free_unneeded(self._launch, self.backing.aim)
                for work in self._due_writes():
                    tasks.create_task(work)
                if self.backing.is_next_ready():
                    tasks.create_task(self.backing.send_next())
                await asyncio.sleep(max(self.place.look_s, 0.0 if self._arenas.list_arenas() else _IDLE_S))

    async def check_snapshots(self) -> None:
        """Compute checksums of each rank's newest snapshot, at low speed. Older ones are soon overwritten."""
        while True:
            began_at = self._ports.clock.monotonic()
            for own in self._arenas.list_arenas():
                newest = next(iter(own.arena.list_sealed()), None)
                if newest and not own.arena.read_checksums(newest.slot):
                    await asyncio.to_thread(own.arena.write_checksums, newest.slot)
            await asyncio.sleep(max(_IDLE_S, (self._ports.clock.monotonic() - began_at) / _CHECKING))

    def _due_writes(self) -> Iterator[Coroutine[None, None, None]]:
        """Yield due work: a first test of the disk, marks for checkpoints in doubt, and checkpoints to write."""
        if self.disk.unseen and self._arenas.list_arenas():
            yield self.disk.look_at_path()
        if self._persisting.unmarked and 0 in self._launch.ranks and self._persisting.storage_url(0):
            yield self._persisting.mark_doubts()
        for arena in [own.arena for own in self._arenas.list_arenas()]:
            rank, fresh = arena.rank, self._fresh_snapshots(arena)
            due = next((one for one in fresh if self._persisting.is_due(rank, one)), None)
            if due is None:
                continue
            if not arena.can_pin(late=self.backing.is_late()):
                self.backing.step_aside()  # or snapshots would lack a slot
            yield self._persisting.write_snapshot(rank, arena, due)

    def _fresh_snapshots(self, arena: Arena) -> tuple[SealedSnapshot, ...]:
        """Return snapshots of this generation or the wanted step, newest first; () if nothing has changed."""
        wanted = self._persisting.wanted
        fresh = tuple(
            one for one in arena.list_sealed() if one.generation == self._launch.generation or one.step == wanted
        )
        looks = tuple((one.seq, one.flags) for one in fresh)
        seen, self._seen[arena.rank] = self._seen.get(arena.rank), looks
        return fresh if seen != looks else ()
