"""Arenas that the holder of a simulated machine keeps for its agents and ranks."""

import contextlib
import gc
import os
from collections.abc import Iterator

from holdfast.checkpoint.arena import Arena, ArenaError, SealedSnapshot
from holdfast.sim.dst.simulated_state_image import StateTruth, read_truths
from holdfast.wire.holder_messages import KeptArena

_MANY_FILES = 400  # a process may often have 1,024


class HolderMemory:
    """Arenas by name, in kernel memory like a real holder's. They outlive agents and ranks, but not the machine."""

    def __init__(self) -> None:
        self.kept: dict[str, KeptArena] = {}

    def make_arena(self, name: str, size: int) -> str:
        """Make an arena of this name, or keep an existing one of the same size; return its path."""
        kept = self.kept.get(name)
        if kept is None or kept.bytes != size:
            if kept:
                _close_arena(kept)
            fd = os.memfd_create(f"simulated-{name}")
            if fd >= _MANY_FILES:  # mappings hold theirs until the dead agents and worlds that have them are collected
                gc.collect()
            os.ftruncate(fd, size)
            kept = self.kept[name] = KeptArena(name=name, bytes=size, path=f"/proc/self/fd/{fd}")
        return kept.path

    def release_pins(self) -> None:
        """Release the pins of a process that has died. Real pins are released by the kernel, but the simulated
        processes are all one real process."""
        for arena in self._open_arenas():
            for slot in range(arena.slots):
                arena.unpin(slot)

    def list_states(self) -> Iterator[tuple[int, SealedSnapshot, StateTruth]]:
        """Yield the contents of all sealed snapshots and copies, page by page: the rank of the arena, the snapshot, and
        the page's `StateTruth`."""
        for arena, sealed in [(one, sealed) for one in self._open_arenas() for sealed in one.list_sealed()]:
            for truth in read_truths(arena.slot_image(sealed.slot)):
                yield arena.rank, sealed, truth

    def _open_arenas(self) -> Iterator[Arena]:
        for kept in self.kept.values():
            with contextlib.suppress(ArenaError):  # made, and never used
                yield Arena.open(kept.path)

    def lose_all(self) -> None:
        for kept in self.kept.values():
            _close_arena(kept)
        self.kept.clear()


def _close_arena(kept: KeptArena) -> None:
    os.close(int(kept.path.rpartition("/")[2]))
