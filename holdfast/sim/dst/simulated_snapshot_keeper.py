"""The keeper of a simulated agent: the real copy sender and the real decisions, over records without bytes.

Every record says which generation really made the snapshot. Keepers cannot know that, so only the checks may read it.
"""

from collections.abc import Collection, Iterable
from typing import Protocol

import msgspec

from holdfast.core.snapshots.copy_intake import CopyName, Intake, judge_copy, refuse_generation
from holdfast.core.snapshots.disk_floor import list_stored_ranks
from holdfast.core.snapshots.floor_pins_and_copies import OwnSnapshot, Sealed
from holdfast.core.snapshots.keeper_launch import KeeperLaunch, read_launch
from holdfast.core.snapshots.slot_pin_limit import can_spare_slot
from holdfast.model.errand import LaunchHere
from holdfast.model.state_copy import Aim, Copy
from holdfast.wire.rank_keeper_messages import ArenaRequest

_SLOTS = 4  # of a rank
_SHELF = 2  # of a copy: the floor, and the next that is coming in


class SimSnapshot(msgspec.Struct, kw_only=True):
    step: int
    label: int  # the generation that its memory names
    made: int  # the generation that made it, in truth
    nan_at: int  # in truth: it leads to NaN at this step; -1: it does not
    verified: bool = False
    seq: int = 0  # in its arena

    @property
    def name(self) -> CopyName:
        return CopyName(step=self.step, generation=self.label)


class SimArena:
    """The snapshot slots of one rank, oldest first."""

    def __init__(self, number: int, world: int, slots: int) -> None:
        self.number = number
        self.world = world
        self.slots = slots
        self.snaps: list[SimSnapshot] = []
        self._seq = 0

    def put_snapshot(self, snap: SimSnapshot, pinned: Iterable[SimSnapshot]) -> bool:
        """Store a snapshot in a free slot, else in place of the oldest unpinned one; False if all are pinned.

        The newest is replaced only if all others are pinned.
        """
        if len(self.snaps) >= self.slots:
            held = [id(one) for one in pinned]
            free = [one for one in self.snaps if id(one) not in held]
            if not free:
                return False
            self.snaps.remove(free[0])
        self._seq += 1
        snap.seq = self._seq
        self.snaps.append(snap)
        return True

    def find_step(self, step: int) -> SimSnapshot | None:
        return next((snap for snap in reversed(self.snaps) if snap.step == step), None)

    def drop_after(self, step: int) -> None:
        self.snaps = [snap for snap in self.snaps if snap.step <= step]


class HolderMemory:
    """Snapshots in the holder's memory, which outlive agents and ranks but not the machine."""

    def __init__(self) -> None:
        self.own: dict[int, SimArena] = {}
        self.shelf: dict[int, SimArena] = {}
        self.asked: dict[int, int] = {}  # rank -> the generation in which it asked for its arena last
        self._arenas = 0

    def fit_arena(self, arenas: dict[int, SimArena], rank: int, world: int, slots: int) -> SimArena:
        """Return the rank's arena; replace it by a new one if it is missing or was made for another job size."""
        if rank not in arenas or arenas[rank].world != world:
            self._arenas += 1
            arenas[rank] = SimArena(self._arenas, world, slots)
        return arenas[rank]

    def list_snapshots(self) -> list[tuple[int, SimSnapshot]]:
        """Return all snapshots and the ranks that they are of."""
        arenas = (*self.own.items(), *self.shelf.items())
        return [(rank, snap) for rank, arena in arenas for snap in arena.snaps]

    def take_snapshot(self, rank: int, world: int, snap: SimSnapshot, pinned: Iterable[SimSnapshot]) -> bool:
        """Store a snapshot of a rank that runs on this machine; False if no slot is free."""
        return self.fit_arena(self.own, rank, world, _SLOTS).put_snapshot(snap, pinned)


DiskEntry = tuple[int, int, SimSnapshot]  # rank, world, state


class SimStates:
    """States on a machine's disk, which outlive its memory; each with the size of its world."""

    def __init__(self) -> None:
        self.kept: list[DiskEntry] = []

    def find_step(self, rank: int, step: int) -> SimSnapshot | None:
        """Return the rank's state of this step that the latest generation has written; None if there is none."""
        found = [snap for of, _, snap in self.kept if (of, snap.step) == (rank, step)]
        return max(found, key=lambda snap: snap.label, default=None)

    def list_unstored(self, stored: int, spared: Collection[int]) -> list[DiskEntry]:
        """Return the states that stay on disk at the end of the job."""
        newest: dict[int, int] = {}
        for rank, _, snap in self.kept:
            newest[rank] = max(newest.get(rank, -1), snap.step)
        gone = list_stored_ranks(newest, stored, spared)
        return [one for one in self.kept if one[0] not in gone]


class SimOwnSnapshots:
    """The snapshots of a machine's own ranks, and one agent's pins; the pins end with the agent."""

    def __init__(self, memory: HolderMemory) -> None:
        self.pinned: dict[OwnSnapshot, SimSnapshot] = {}
        self._memory = memory

    def list_snapshots(self) -> Sealed:
        return tuple(
            OwnSnapshot(rank=rank, arena=arena.number, seq=snap.seq, step=snap.step, generation=snap.label)
            for rank, arena in self._memory.own.items()
            for snap in reversed(arena.snaps)
        )

    def count_slots(self, rank: int) -> int:
        return self._memory.own[rank].slots

    def list_pinned(self, rank: int) -> list[SimSnapshot]:
        """Return the snapshots that the rank may not overwrite."""
        return [snap for own, snap in self.pinned.items() if own.rank == rank]

    def pin_own(self, snapshot: OwnSnapshot, *, spare: bool, late: bool = False) -> bool:
        slots, pinned = self.count_slots(snapshot.rank), len(self.list_pinned(snapshot.rank))
        if spare and not can_spare_slot(slots, pinned, late=late):
            return False
        self.pinned[snapshot] = self._find_snapshot(snapshot)
        return True

    def unpin_own(self, snapshot: OwnSnapshot) -> None:
        del self.pinned[snapshot]

    def mark_verified(self, snapshot: OwnSnapshot) -> None:
        self._find_snapshot(snapshot).verified = True

    def _find_snapshot(self, snapshot: OwnSnapshot) -> SimSnapshot:
        return next(snap for snap in self._memory.own[snapshot.rank].snaps if snap.seq == snapshot.seq)


class CopySender(Protocol):
    """The methods of the real copy sender that a simulated keeper uses; the caller of a simulation supplies it."""

    @property
    def backed(self) -> int: ...

    @property
    def took_s(self) -> float: ...

    def begin_generation(self, generation: int, ranks: int, shared_step: int) -> None: ...

    def on_want(self, want: ArenaRequest) -> None: ...

    def set_aim(self, aim: Aim) -> None: ...

    def newest_shared_step(self) -> int: ...

    def wants_verification(self) -> bool: ...

    def is_next_ready(self) -> bool: ...

    async def send_next(self) -> None: ...


class SimKeeper:
    """One agent's access to the snapshot memory."""

    def __init__(
        self,
        node: str,
        memory: HolderMemory,
        snapshots: SimOwnSnapshots,
        sender: CopySender,
        *,
        verifies: bool,
        states: SimStates,
    ) -> None:
        self.node = node
        self.states = states
        self.disked = self.disk_tried = self._disk_aimed = -1
        self.memory = memory
        self.snapshots = snapshots
        self.sender = sender
        self.launch = KeeperLaunch()
        self.stored = -1
        self._verifies = verifies
        self._kept_floor: dict[int, SimSnapshot] = {}  # pinned, of the ranks of other nodes

    # --- generations -------------------------------------------------------------------------------------------

    def recall_launch(self, launch: LaunchHere | None) -> None:
        """Take over the newest launch from the previous agent, and the arenas that the launch's ranks requested."""
        if launch is None:
            return
        self._begin_generation(launch)
        for rank in self.launch.ranks:
            if self.memory.asked.get(rank) == launch.generation:
                self.grant_arena(rank, launch.world_size)

    def begin_launch(self, errand: LaunchHere) -> None:
        """Begin a generation: drop all snapshots newer than the state that the job resumes from."""
        self._begin_generation(errand)
        last = self.launch.shared_step
        for arena in (*self.memory.own.values(), *self.memory.shelf.values()):
            arena.drop_after(last)
        self._kept_floor = {rank: snap for rank, snap in self._kept_floor.items() if snap.step <= last}

    def list_wanted(self) -> list[DiskEntry]:
        """Return the states on disk that the launch does not give up."""
        return [one for one in self.states.kept if not self.launch.gives_up(one[2].label, one[2].step)]

    def _begin_generation(self, errand: LaunchHere) -> None:
        launch = self.launch = read_launch(errand)
        self.stored = self.disked = self.disk_tried = self._disk_aimed = -1
        self.sender.begin_generation(launch.generation, len(launch.ranks), launch.shared_step)
        self.sender.set_aim(errand.aim)

    def grant_arena(self, rank: int, world: int) -> None:
        """Give a rank of this generation the memory for its snapshots."""
        generation = self.memory.asked[rank] = self.launch.generation
        slots = self.memory.fit_arena(self.memory.own, rank, world, _SLOTS).slots
        self.sender.on_want(
            ArenaRequest(
                rank=rank,
                world=world,
                generation=generation,
                layout="",
                image_bytes=0,
                slots=slots,
                share=(),
                verified=self._verifies,
            )
        )

    def list_copies(self) -> tuple[Copy, ...]:
        own = [(rank, arena, True) for rank, arena in self.memory.own.items()]
        kept = [(rank, arena, False) for rank, arena in self.memory.shelf.items()]
        held = [(rank, arena.world, snap, whole) for rank, arena, whole in (*own, *kept) for snap in arena.snaps]
        disks = [(rank, world, snap, True) for rank, world, snap in self.states.kept]
        return tuple(
            Copy(
                rank=rank,
                step=snap.step,
                node=self.node,
                layout="",
                world=world,
                whole=whole,
                verified=snap.verified,
                disk=number >= len(held),
                generation=snap.label,
            )
            for number, (rank, world, snap, whole) in enumerate((*held, *disks))
        )

    # --- ranks -------------------------------------------------------------------------------------------------

    def own_snapshot(self, rank: int) -> SimSnapshot | None:
        arena, step = self.memory.own.get(rank), self.launch.restore.step
        found = arena.find_step(step) if arena else None
        return found or self.states.find_step(rank, step)

    def give_snapshot(self, rank: int, step: int) -> SimSnapshot | None:
        """Return the snapshot of a rank at a step, for another keeper; None if this node does not hold it."""
        for arenas in (self.memory.own, self.memory.shelf):
            if rank in arenas and (snap := arenas[rank].find_step(step)):
                return snap
        return self.states.find_step(rank, step)

    # --- this node's disk --------------------------------------------------------------------------------------

    def begin_disk_write(self, aim: Aim) -> list[DiskEntry] | None:
        """Return the states that are to be written now; None if that was begun before."""
        if aim.generation != self.launch.generation or aim.disk <= self._disk_aimed:
            return None
        self._disk_aimed = aim.disk
        arenas = [(rank, self.memory.own[rank]) for rank in self.launch.ranks if rank in self.memory.own]
        found = [(rank, arena.world, arena.find_step(aim.disk)) for rank, arena in arenas]
        verified = aim.verified >= aim.disk
        return [(rank, world, msgspec.structs.replace(snap, verified=verified)) for rank, world, snap in found if snap]

    def end_disk_write(self, aim: Aim, states: list[DiskEntry], *, full: bool) -> None:
        """Put the states on disk, unless it is full, not all ranks have one, or another generation has begun."""
        if aim.generation != self.launch.generation:
            return
        self.disk_tried = aim.disk
        if len(states) == len(self.launch.ranks) and not full:
            self.states.kept += states
            self.disked = aim.disk

    # --- copies of other nodes ---------------------------------------------------------------------------------

    def apply_aim(self, aim: Aim) -> None:
        self.sender.set_aim(aim)
        if aim.floor >= 0 and aim.generation == self.launch.generation:
            for rank in [rank for rank in self.memory.shelf if not self._pin_kept(rank, aim.floor)]:
                del self.memory.shelf[rank]
                self._kept_floor.pop(rank, None)

    def keep_copy(self, rank: int, world: int, floor: int, snap: SimSnapshot) -> str:
        """Store a copy of a snapshot from another node; return why it is refused, empty if it is stored."""
        if why := refuse_generation(snap.label, self.launch.generation):
            return why
        arena = self.memory.fit_arena(self.memory.shelf, rank, world, _SHELF)
        self._pin_kept(rank, floor)
        if judge_copy(snap.name, None, [one.name for one in arena.snaps]) is Intake.HELD:
            return ""
        held = [self._kept_floor[rank]] if rank in self._kept_floor else []
        kept = arena.put_snapshot(msgspec.structs.replace(snap, verified=False), held)
        return "" if kept else "all copies of this rank are in use"

    def _pin_kept(self, rank: int, floor: int) -> bool:
        """Pin the rank's copy at the floor step instead of the one pinned before; False if there is no such copy."""
        found = self.memory.shelf[rank].find_step(floor)
        if found:
            self._kept_floor[rank] = found
        return found is not None
