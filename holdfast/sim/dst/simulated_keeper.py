"""Simulated snapshot memory of a machine: snapshots of its own ranks, and copies that it keeps for other nodes.

Parallel to `keeper.py`, `peer_sender.py` and `peer_copies.py` of `agent/snapshots`, without the bytes. Instead every
snapshot records which generation really made it; no keeper knows that, and only the checks may read it.
"""

from collections.abc import Iterable

import msgspec

from holdfast.model.errand import LaunchHere
from holdfast.model.state_copy import Aim, Copy, Restore, Source

_SLOTS = 4  # of a rank
_SHELF = 2  # of a copy: the floor, and the next that is coming in


class SimSnapshot(msgspec.Struct, kw_only=True):
    step: int
    label: int  # the generation that its memory names
    made: int  # the generation that made it, in truth
    nan_at: int  # in truth: it leads to NaN at this step; -1: it does not
    verified: bool = False


class SimArena:
    """The snapshot slots of one rank, oldest first."""

    def __init__(self, world: int, slots: int) -> None:
        self.world = world
        self.slots = slots
        self.snaps: list[SimSnapshot] = []

    def put_snapshot(self, snap: SimSnapshot, pinned: Iterable[SimSnapshot]) -> bool:
        """Store a snapshot, replacing the oldest one that is neither pinned nor the newest; False if none can go."""
        held = list(pinned)
        if len(self.snaps) >= self.slots:
            free = [one for one in self.snaps[:-1] if not any(one is other for other in held)]
            if not free:
                return False
            self.snaps.remove(free[0])
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

    def take_snapshot(self, rank: int, world: int, snap: SimSnapshot, pinned: Iterable[SimSnapshot]) -> bool:
        """Store a snapshot of a rank that runs on this machine; False if no slot is free."""
        arena = self.own.get(rank)
        if arena is None or arena.world != world:
            arena = self.own[rank] = SimArena(world, _SLOTS)
        return arena.put_snapshot(snap, pinned)


class SimKeeper:
    """One agent's access to the snapshot memory; its pins are released when the agent ends."""

    def __init__(self, node: str, memory: HolderMemory, verifies: bool) -> None:
        self.node = node
        self.memory = memory
        self.verifies = verifies
        self.generation = 0
        self.restore = Restore()
        self.aim = Aim(generation=0)
        self.backed = -1
        self.stored = -1
        self.sending = 0  # the step that is on its way to the peer, 0: none
        self.ranks: tuple[int, ...] = ()
        self._floor: dict[int, SimSnapshot] = {}
        self._before: dict[int, SimSnapshot] = {}
        self._next: dict[int, SimSnapshot] = {}

    # --- generations -------------------------------------------------------------------------------------------

    def recall_launch(self, launch: LaunchHere | None) -> None:
        if launch is not None:
            self._begin_generation(launch)

    def begin_launch(self, errand: LaunchHere) -> None:
        """Begin a generation: drop all snapshots newer than the state that the job resumes from."""
        self._begin_generation(errand)
        line = errand.restore.step if errand.restore.sources and not errand.astray else -1
        for arena in (*self.memory.own.values(), *self.memory.shelf.values()):
            arena.drop_after(line)
        for held in (self._before, self._floor):
            if any(snap.step > line for snap in held.values()):
                held.clear()

    def _begin_generation(self, errand: LaunchHere) -> None:
        seat = errand.seat
        self.generation, self.restore = errand.generation, errand.restore
        self.ranks = tuple(range(seat.first_rank, seat.first_rank + seat.nproc))
        self.aim, self.backed, self.stored, self.sending = Aim(generation=errand.generation), -1, -1, 0
        self._next.clear()
        self.apply_aim(errand.aim)

    def list_copies(self) -> tuple[Copy, ...]:
        own = [(rank, arena, True) for rank, arena in self.memory.own.items()]
        kept = [(rank, arena, False) for rank, arena in self.memory.shelf.items()]
        return tuple(
            Copy(
                rank=rank,
                step=snap.step,
                node=self.node,
                layout="",
                world=arena.world,
                whole=whole,
                verified=snap.verified,
            )
            for rank, arena, whole in (*own, *kept)
            for snap in arena.snaps
        )

    # --- ranks -------------------------------------------------------------------------------------------------

    def restore_source(self, rank: int) -> Source | None:
        return next((source for source in self.restore.sources if source.rank == rank), None)

    def own_snapshot(self, rank: int) -> SimSnapshot | None:
        arena = self.memory.own.get(rank)
        return arena.find_step(self.restore.step) if arena else None

    def give_snapshot(self, rank: int, step: int) -> SimSnapshot | None:
        """Return the snapshot of a rank at a step, for another keeper; None if this node does not hold it."""
        for arenas in (self.memory.own, self.memory.shelf):
            if rank in arenas and (snap := arenas[rank].find_step(step)):
                return snap
        return None

    def pinned_snapshots(self, rank: int) -> list[SimSnapshot]:
        """Return the snapshots that the rank may not overwrite."""
        return [held[rank] for held in (self._floor, self._before, self._next) if rank in held]

    # --- copies on peers ---------------------------------------------------------------------------------------

    def sealed_step(self) -> int:
        if not self.aim.peer and not self.verifies:
            return -1
        return min((self._newest_step(rank) for rank in self.ranks), default=-1)

    def _newest_step(self, rank: int) -> int:
        arena = self.memory.own.get(rank)
        steps = [snap.step for snap in arena.snaps if snap.label == self.generation] if arena else []
        return max(steps, default=-1)

    def apply_aim(self, aim: Aim) -> None:
        if aim.generation != self.aim.generation:
            return
        before, self.aim = self.aim, aim
        if aim.floor >= 0 and {snap.step for snap in self._floor.values()} != {aim.floor}:
            self._before, self._floor = self._floor, self._find_snapshots(aim.floor)
            self._next.clear()
            if not self.verifies:
                self._before = {}
        if aim.next != before.next:
            self._next.clear()
            self.sending = 0
        if aim.verified >= 0:
            for snap in self._find_snapshots(aim.verified).values():
                snap.verified = True
        if aim.verified == aim.floor:
            self._before = {}
        if aim.floor >= 0:  # copies that lack it belong to nobody
            lacking = [rank for rank, arena in self.memory.shelf.items() if not arena.find_step(aim.floor)]
            for rank in lacking:
                del self.memory.shelf[rank]

    def _find_snapshots(self, step: int) -> dict[int, SimSnapshot]:
        found = {rank: arena.find_step(step) for rank, arena in self.memory.own.items() if rank in self.ranks}
        return {rank: snap for rank, snap in found.items() if snap}

    def ready_snapshots(self) -> dict[int, SimSnapshot]:
        """Return the snapshots to send now, all of the same step; empty while a rank is not that far."""
        if self.aim.next < 0 or self.backed >= self.aim.next or self.sending:
            return {}
        least = max([self.aim.next, *(snap.step for snap in self._next.values())])
        for rank in self.ranks:
            if rank in self._next and self._next[rank].step >= least:
                continue
            arena = self.memory.own.get(rank)
            fresh = [s for s in arena.snaps if s.label == self.generation and s.step >= least] if arena else []
            if fresh:
                self._next[rank] = min(fresh, key=lambda snap: snap.step)
        steps = {snap.step for snap in self._next.values()}
        return dict(self._next) if len(self._next) == len(self.ranks) and len(steps) == 1 else {}

    def keep_copy(self, rank: int, generation: int, world: int, snap: SimSnapshot) -> bool:
        """Store a copy of another node's rank; False if it belongs to another generation or no slot is free."""
        if generation != self.generation:
            return False
        arena = self.memory.shelf.get(rank)
        if arena is None or arena.world != world:
            arena = self.memory.shelf[rank] = SimArena(world, _SHELF)
        found, held = arena.find_step(snap.step), arena.find_step(self.aim.floor)
        if found and found.label == snap.label:
            return True
        return arena.put_snapshot(msgspec.structs.replace(snap, verified=False), [held] if held else ())
