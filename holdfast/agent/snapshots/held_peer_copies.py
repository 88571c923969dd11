"""Keeps copies of other nodes' snapshots, and hands states to keepers that fetch them for lost ranks.

Connections from other keepers are served in threads, so a lock guards the copies.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from itertools import accumulate

import msgspec

from holdfast.agent.snapshots.arena_table import ArenaTable, SnapshotPin, pin_snapshot
from holdfast.agent.snapshots.keeper_interfaces import KeeperNotes, KeeperPorts, StateDisk
from holdfast.agent.snapshots.parity_copies import ParityCopies
from holdfast.agent.snapshots.peer_arenas import NO_LAYOUT, PREFIX, PeerArena, PeerLayouts, PeerMemory
from holdfast.checkpoint.arena import Arena, ArenaError, SealedSnapshot, SnapshotSlot
from holdfast.checkpoint.peer_server import GivenState, PushTarget
from holdfast.checkpoint.peer_transport import PeerRefusal, PeerRequest, cut_range
from holdfast.core.snapshots.copy_intake import CopyName, Intake, judge_copy, refuse_generation
from holdfast.core.snapshots.keeper_launch_state import KeeperLaunch
from holdfast.model.job_and_seats import Seat
from holdfast.wire.rank_keeper_messages import layout_file_name

_LAST_CHUNK_S = 0.2


class IncomingCopy(msgspec.Struct):
    """A copy that is being received; after a broken connection, it resumes where it stopped."""

    name: CopyName
    slot: SnapshotSlot
    holding: PushTarget


class HeldPeerCopies:
    def __init__(
        self, notes: KeeperNotes, arenas: ArenaTable, memory: PeerMemory, disk: StateDisk, ports: KeeperPorts
    ) -> None:
        self._say = ports.say
        self._disk = disk
        self._notes = notes
        self._arenas = arenas  # of this node's own ranks, which others may fetch from as well
        self._memory = memory
        self._plans = PeerLayouts(notes)
        self._backups: dict[int, PeerArena] = {}
        self._names: dict[int, str] = {}  # of the memory of these, where it is not the rank's number
        self._older: dict[str, PeerArena] = {}  # of another number of ranks, until the next floor is held
        self._coming: dict[int, IncomingCopy] = {}
        self._given_up: dict[int, list[PushTarget]] = {}  # into whose memory a last chunk may still come
        self.pairs = ParityCopies(notes, self._plans, self._memory, ports.report_progress)
        self._generation = 0
        self._wards: tuple[Seat, ...] = ()
        self._sound: set[tuple[Arena, int]] = set()  # and seq: found undamaged in this generation
        self._lock = threading.Lock()

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._memory.use_loop(loop)

    def adopt_arena(self, name: str, arena: Arena) -> None:
        name, rank = name.removeprefix(PREFIX), arena.rank
        if name == str(rank) and rank in self._backups:
            self._older[name] = PeerArena(arena)
        elif name in (str(rank), _later_name(rank, arena.world)):
            self._replace_copies(name, PeerArena(arena))
        else:
            self.pairs.adopt_arena(name, arena)

    def begin_launch(self, launch: KeeperLaunch) -> None:
        """Drop copies whose lineage this launch does not continue. Accept only copies of this launch's generation."""
        with self._lock:
            self._generation = launch.generation
            self._sound.clear()
            for rank in [*self._coming]:
                self._give_up_copy(rank)
            for backup in self._all_backups():
                backup.forget_left(launch)
        self.pairs.begin_launch(launch)

    def list_copies(self) -> Iterator[tuple[Arena, SealedSnapshot, bool]]:
        """Yield each sealed copy with its arena, and whether it is the rank's whole image."""
        with self._lock:
            for backup in self._all_backups():
                plan = self._plans.get(backup.arena.rank, backup.arena.layout.hex())
                for one in backup.arena.list_sealed() if plan else ():
                    yield backup.arena, one, plan is not None and plan.image_bytes == backup.arena.image_bytes

    def pin_floor(self, floor: int) -> list[str]:
        """Pin the copies of step `floor`. Forget arenas without such a copy, unless a copy is being received there;
        return their names, so that the caller frees them."""
        left = self.pairs.pin_floor(floor)
        with self._lock:
            for rank, backup in list(self._backups.items()):
                if not backup.pin_step(floor) and rank not in self._coming:
                    backup.unpin()
                    del self._backups[rank]
                    left.append(f"{PREFIX}{self._names.pop(rank, str(rank))}")
            for name, backup in self._older.items():
                backup.unpin()
                left.append(f"{PREFIX}{name}")
            self._older.clear()
        return left

    def _all_backups(self) -> list[PeerArena]:
        return [*self._backups.values(), *self._older.values()]

    def _replace_copies(self, name: str, backup: PeerArena) -> None:
        """Make this the memory of its rank's copies. If it has another name than the memory before, which is of another
        number of ranks, that stays: until the next floor is held, a failure may lead back to it."""
        rank = backup.arena.rank
        before = self._backups.get(rank)
        if before and name != (known := self._names.get(rank, str(rank))):
            self._older[known] = before
        self._backups[rank], self._names[rank] = backup, name

    def _name_memory(self, ask: PeerRequest) -> tuple[PeerArena | None, str]:
        """Return the memory with the rank's copies, and the name of the memory for the pushed copy. If the copies are
        of another number of ranks, it gets memory of its own."""
        found, name = self._backups.get(ask.rank), self._names.get(ask.rank, str(ask.rank))
        if found and found.arena.world != ask.world and found.arena.list_sealed():
            return None, _later_name(ask.rank, ask.world)
        return found, name

    # --- a peer's copies come in -------------------------------------------------------------------------------

    def set_wards(self, wards: tuple[Seat, ...]) -> None:
        """Accept copies from another host only if its node is in `wards` and has the copied rank."""
        self._wards = wards

    def receive_push(self, ask: PeerRequest, node: str = "") -> PushTarget | PeerRefusal:
        if node and not any(seat.node == node and seat.has_rank(ask.rank) for seat in self._wards):
            return PeerRefusal(f"this node keeps no copies of rank {ask.rank} for {node}")
        if ask.verb == "tell":
            return self._plans.receive_layout(ask)
        plan = self._plans.get(ask.rank, ask.layout)
        if plan is None:
            return NO_LAYOUT
        if ask.pair:
            return self.pairs.receive_half(ask, plan)
        sizes = [part.end - part.start for part in plan.owned_ranges()]
        if sum(sizes) != ask.bytes:
            return PeerRefusal(f"a copy of rank {ask.rank} has {sum(sizes)} bytes by its layout, not {ask.bytes}")
        try:
            found, name = self._name_memory(ask)
            backup = self._memory.fit_arena(found, name, bytes.fromhex(ask.layout), ask, ask.bytes)
        except (OSError, ArenaError, TimeoutError) as e:
            return PeerRefusal(f"no memory for a copy of rank {ask.rank}: {e}")
        with self._lock:
            if why := refuse_generation(ask.generation, self._generation):
                return PeerRefusal(why)
            self._replace_copies(name, backup)
            return self._incoming_target(backup, ask, sizes)

    def _incoming_target(self, backup: PeerArena, ask: PeerRequest, sizes: list[int]) -> PushTarget | PeerRefusal:
        if ask.floor >= 0:
            backup.pin_step(ask.floor)  # our own word of it may come later than the copy of the next
        coming = self._coming.get(ask.rank)
        sealed = [CopyName(step=one.step, generation=one.generation) for one in backup.arena.list_sealed()]
        name = CopyName(step=ask.step, generation=ask.generation)
        intake = judge_copy(name, coming.name if coming else None, sealed)
        if coming and intake is Intake.RESUME:
            return coming.holding
        if intake is Intake.HELD:
            return PushTarget([], sum(len(cut_range(0, size)) for size in sizes), _do_nothing)
        self._give_up_copy(ask.rank)
        slot = backup.arena.begin_slot(ask.step, ask.generation) if self._are_quiet(ask.rank) else None
        if slot is None:
            return PeerRefusal(f"all slots for copies of rank {ask.rank} are in use")
        ends = list(accumulate(sizes))  # both sides cut it into chunks alike
        views = [slot.image[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        holding = PushTarget(views, 0, partial(self._seal_copy, backup.arena, slot))
        self._coming[ask.rank] = IncomingCopy(name, slot, holding)
        return holding

    def _give_up_copy(self, rank: int) -> None:
        """Forget a copy that is being received and refuse its further chunks, because its slot may be reused."""
        if coming := self._coming.pop(rank, None):
            coming.holding.give_up()
            self._given_up.setdefault(rank, []).append(coming.holding)

    def _are_quiet(self, rank: int) -> bool:
        """Return whether no thread writes to the rank's abandoned copies, after a short wait for their last chunks."""
        late = [one for one in self._given_up.pop(rank, ()) if not one.is_quiet(_LAST_CHUNK_S)]
        if late:
            self._given_up[rank] = late
        return not late

    def _seal_copy(self, arena: Arena, slot: SnapshotSlot) -> None:
        with self._lock:
            coming = self._coming.get(arena.rank)
            if coming is None or coming.slot is not slot:
                return
            slot.seal()
            del self._coming[arena.rank]
        arena.write_checksums(slot.index)

    # --- others fetch ------------------------------------------------------------------------------------------

    def serve_pull(self, ask: PeerRequest) -> GivenState | PeerRefusal:
        """Return the requested layout, or verified byte ranges of a snapshot; a refusal if this node has neither."""
        if ask.verb == "plan":
            with contextlib.suppress(OSError):
                content = self._notes.read_note(layout_file_name(ask.rank, ask.layout))
                return [memoryview(content)], _do_nothing
            state = self._disk.find_state(ask.rank, ask.layout)
            return ([memoryview(msgspec.msgpack.encode(state.note.layout))], _do_nothing) if state else NO_LAYOUT
        for arena, ranges in self._find_ranges(ask):
            pinned = self._pin_sound(arena, ask) if ranges else None
            if pinned is not None:
                return [pinned.image[start:end] for start, end in ranges], pinned.release
        image = None if ask.pair else self._disk.open_image(ask.rank, ask.layout, ask.step, ask.generation)
        if image is not None:
            return [image[start:end] for start, end in ask.ranges], _do_nothing
        return PeerRefusal(f"this node has no state of rank {ask.rank} at step {ask.step}")

    def _find_ranges(self, ask: PeerRequest) -> Iterator[tuple[Arena, tuple[tuple[int, int], ...]]]:
        """Yield the arenas that may hold the requested snapshot, each with the ranges to read there."""
        if ask.pair:
            yield from ((arena, ask.ranges) for arena in self.pairs.find_arenas(ask))
            return
        for own in self._arenas.list_arenas_of(ask.rank):
            if own.arena.layout.hex().startswith(ask.layout):
                yield own.arena, ask.ranges
        with self._lock:
            backups = [backup.arena for backup in self._all_backups() if backup.arena.rank == ask.rank]
        for arena in backups:
            if arena.layout.hex().startswith(ask.layout):
                yield arena, self._compact_ranges(ask)

    def _pin_sound(self, arena: Arena, ask: PeerRequest) -> SnapshotPin | None:
        """Pin the requested snapshot; return None if no undamaged one is here. Damaged snapshots are dropped."""
        for one in arena.list_sealed():
            wanted = one.step == ask.step and ask.generation in (0, one.generation)
            pinned = pin_snapshot(arena, one) if wanted else None
            if pinned is None:
                continue
            wrong = "" if (arena, one.seq) in self._sound else pinned.verify()
            if not wrong:
                self._sound.add((arena, one.seq))
                return pinned
            pinned.release()
            arena.drop(one.slot)
            self._say(f"dropped the damaged copy of rank {ask.rank} at step {one.step} ({wrong})")
        return None

    def _compact_ranges(self, ask: PeerRequest) -> tuple[tuple[int, int], ...]:
        """Convert ranges of an image to ranges of a copy, which is the rank's share; () if a range is not in it."""
        plan = self._plans.get(ask.rank, ask.layout)
        found, before = [], 0
        for part in plan.owned_ranges() if plan else ():
            shift = before - part.start
            found += [(a, b, shift) for a, b in ask.ranges if part.start <= a and b <= part.end]
            before += part.end - part.start
        if len(found) != len(ask.ranges):
            return ()
        shifts = {(a, b): shift for a, b, shift in found}
        return tuple((a + shifts[a, b], b + shifts[a, b]) for a, b in ask.ranges)


def _later_name(rank: int, world: int) -> str:
    """Return the name of memory for copies of a rank, beside those of the rank of another number of ranks."""
    return f"{rank}.{world}"


def _do_nothing() -> None:
    pass
