"""Owns the arenas of this node's own ranks, and the pins of their snapshots.

The event loop adds and replaces arenas. Threads that hash, write or serve snapshots look arenas up here and pin what
they read. A pin belongs to its arena, so it stays valid when the rank gets another arena.
"""

import threading

import msgspec

from holdfast.checkpoint.arena import VERIFIED, Arena, SealedSnapshot
from holdfast.core.snapshots.floor_pins_and_copies import OwnSnapshot, Sealed
from holdfast.core.snapshots.keeper_launch_state import KeeperLaunch
from holdfast.wire.rank_keeper_messages import ArenaRequest


class SnapshotPin:
    """A pinned snapshot: its rank cannot overwrite it until `release`. Releasing it again does nothing."""

    def __init__(self, arena: Arena, sealed: SealedSnapshot) -> None:
        self.arena = arena
        self.sealed = sealed
        self._held = True
        self._lock = threading.Lock()

    @property
    def step(self) -> int:
        return self.sealed.step

    @property
    def image(self) -> memoryview:
        return self.arena.slot_image(self.sealed.slot)

    def verify(self) -> str:
        """Return one sentence on what is wrong with the snapshot; empty if it is intact or has no checksums."""
        return self.arena.verify(self.sealed.slot)

    def release(self) -> None:
        """Unpin the slot, even if its snapshot was dropped; until then nothing can be written to the slot."""
        with self._lock:
            held, self._held = self._held, False
        if held:
            self.arena.unpin(self.sealed.slot)


def pin_snapshot(arena: Arena, sealed: SealedSnapshot) -> SnapshotPin | None:
    """Pin a listed snapshot; return None if it was dropped or overwritten, or if a writer has claimed its slot."""
    return SnapshotPin(arena, sealed) if arena.pin(sealed.slot, sealed.seq) else None


def drop_left(arena: Arena, launch: KeeperLaunch) -> None:
    """Drop the snapshots whose lineage this launch does not continue."""
    for one in arena.list_sealed():
        if launch.drops(one.generation, one.step):
            arena.drop(one.slot)


class OwnArena(msgspec.Struct, frozen=True, kw_only=True):
    """The arena of a rank of this node, and the path at which the rank opens it."""

    path: str
    arena: Arena
    number: int  # of all arenas that this table has had

    def list_snapshots(self) -> Sealed:
        """Return the sealed snapshots of this arena, newest first."""
        return tuple(
            OwnSnapshot(rank=self.arena.rank, arena=self.number, seq=one.seq, step=one.step, generation=one.generation)
            for one in self.arena.list_sealed()
        )

    def find_sealed(self, snapshot: OwnSnapshot) -> SealedSnapshot | None:
        """Find a listed snapshot again; return None if it was overwritten or dropped, or belongs to another arena."""
        if snapshot.arena != self.number:
            return None
        return next((one for one in self.arena.list_sealed() if one.seq == snapshot.seq), None)

    def fits(self, want: ArenaRequest) -> bool:
        """Return whether the arena fits snapshots of the requested layout, size and world."""
        arena = self.arena
        return (arena.layout.hex(), arena.image_bytes, arena.world) == (want.layout, want.image_bytes, want.world)


class ArenaTable:
    """Knows the arena of each rank of this node, and pins snapshots that must not be overwritten.

    Every method may be called from any thread.
    """

    def __init__(self) -> None:
        self._arenas: dict[int, OwnArena] = {}
        self._aside: tuple[OwnArena, ...] = ()
        self._pins: dict[OwnSnapshot, SnapshotPin] = {}
        self._count = 0
        self._lock = threading.Lock()

    def put_arena(self, path: str, arena: Arena, *, aside: bool = False) -> OwnArena:
        """Make this the arena of its rank, instead of an older one, whose pins stay valid until they are released. With
        `aside`, the arena only serves restores and replaces no other."""
        with self._lock:
            self._count += 1
            own = OwnArena(path=path, arena=arena, number=self._count)
            if aside:
                self._aside += (own,)
            else:
                self._arenas[arena.rank] = own
        return own

    def find_arena(self, rank: int) -> OwnArena | None:
        with self._lock:
            return self._arenas.get(rank)

    def list_arenas(self) -> tuple[OwnArena, ...]:
        """Return the arenas of all ranks, as they are now."""
        with self._lock:
            return tuple(self._arenas.values())

    def list_arenas_of(self, rank: int) -> tuple[OwnArena, ...]:
        """Return the arenas with snapshots of this rank: its own, and those that were set aside."""
        with self._lock:
            own = self._arenas.get(rank)
            return (*((own,) if own else ()), *(one for one in self._aside if one.arena.rank == rank))

    def set_aside(self, world: int) -> None:
        """Set aside the arenas whose world size is not `world`, to restore from them; ranks get new arenas."""
        with self._lock:
            self._aside += tuple(own for own in self._arenas.values() if own.arena.world != world)
            self._arenas = {rank: own for rank, own in self._arenas.items() if own.arena.world == world}

    def take_back(self, world: int) -> None:
        """Give the ranks of a world of this size the arenas again that were set aside, instead of others' arenas."""
        with self._lock:
            fits = {rank for rank, own in self._arenas.items() if own.arena.world == world}
            aside = {own.arena.rank: own for own in self._aside if own.arena.world == world}
            back = {rank: own for rank, own in aside.items() if rank not in fits}
            left = tuple(self._arenas[rank] for rank in back if rank in self._arenas)
            self._aside = (*(own for own in self._aside if back.get(own.arena.rank) is not own), *left)
            self._arenas |= back

    def list_aside(self) -> tuple[OwnArena, ...]:
        """Return the arenas that were set aside, in the order of their ranks."""
        with self._lock:
            return tuple(sorted(self._aside, key=lambda own: own.arena.rank))

    def forget_aside(self) -> tuple[str, ...]:
        """Forget the arenas that were set aside; return their paths."""
        with self._lock:
            gone, self._aside = self._aside, ()
        return tuple(own.path for own in gone)

    def list_snapshots(self) -> Sealed:
        """Return the sealed snapshots of all arenas, for each rank the newest first."""
        return tuple(one for own in self.list_arenas() for one in own.list_snapshots())

    def count_slots(self, rank: int) -> int:
        """Return how many snapshots the rank's arena can hold; 0 if the rank has no arena."""
        own = self.find_arena(rank)
        return own.arena.slots if own else 0

    def pin_own(self, snapshot: OwnSnapshot, *, spare: bool, late: bool = False) -> bool:
        """Pin a listed snapshot until `unpin_own`; return False if it is gone. With `spare`, also return False if fewer
        than two of the rank's slots would stay unpinned; one is enough for few slots, or if copies are `late`."""
        own = self.find_arena(snapshot.rank)
        found = own.find_sealed(snapshot) if own else None
        if own is None or found is None or (spare and not own.arena.can_pin(late=late)):
            return False
        pinned = pin_snapshot(own.arena, found)
        if pinned is None:
            return False
        with self._lock:
            self._pins[snapshot] = pinned
        return True

    def unpin_own(self, snapshot: OwnSnapshot) -> None:
        with self._lock:
            pinned = self._pins.pop(snapshot)
        pinned.release()

    def read_pinned(self, snapshot: OwnSnapshot) -> memoryview:
        """Return the image of a snapshot that `pin_own` has pinned."""
        with self._lock:
            return self._pins[snapshot].image

    def mark_verified(self, snapshot: OwnSnapshot) -> None:
        """Flag a listed snapshot as verified, unless it is gone."""
        own = self.find_arena(snapshot.rank)
        found = own.find_sealed(snapshot) if own else None
        if own and found and not found.flags & VERIFIED:
            own.arena.flag_slot(found.slot, VERIFIED)

    def drop_left(self, launch: KeeperLaunch) -> None:
        """Drop all snapshots, even pinned ones, whose lineage this launch does not continue."""
        for own in (*self.list_arenas(), *self.list_aside()):
            drop_left(own.arena, launch)
