"""The arenas of ranks by name in the holder's memory; those of a world of another size are set aside, to restore from.

A state that is whole on every rank can be restored in a world of any size. Its snapshots are laid out for the old size,
so ranks get new arenas, and the old ones stay until every rank here has a snapshot of its own.
"""

from collections.abc import Iterator

from holdfast.agent.snapshots.arena_table import ArenaTable, OwnArena
from holdfast.agent.snapshots.keeper_interfaces import MakeArena
from holdfast.checkpoint.arena import Arena


class ArenasAside:
    def __init__(self, arenas: ArenaTable, make_arena: MakeArena) -> None:
        self._arenas, self._make_arena = arenas, make_arena
        self._names: dict[str, str] = {}  # by path

    def adopt_arena(self, name: str, path: str, world: int) -> None:
        """Take over a rank's arena from an earlier agent; set it aside if it is of another world than `world`, which
        is 0 if any will do. Raises ArenaError."""
        arena = Arena.open(path)
        self._names[path] = name
        self._arenas.put_arena(path, arena, aside=bool(world) and arena.world != world)

    async def make_memory(self, rank: int, generation: int, size_bytes: int) -> str:
        """Have memory made for a rank's next arena, in place of its present one; return its path."""
        own, name = self._arenas.find_arena(rank), f"rank-{rank}"
        if own is not None:
            name = self._names.get(own.path, name)
        elif name in {self._names.get(one.path) for one in self._arenas.list_aside()}:
            name = f"{name}-{generation}"
        path = await self._make_arena(name, size_bytes)
        self._names[path] = name
        return path

    def find_whole(self, ranks: tuple[int, ...], rank: int, step: int) -> Iterator[OwnArena]:
        """Yield the arenas that hold this step and may serve `rank`, one of this node's `ranks`: its own, then those
        that were set aside, beginning with the one that ranks of its place on the node had."""
        own, aside = self._arenas.find_arena(rank), self._arenas.list_aside()
        first = ranks.index(rank)
        for one in (*((own,) if own else ()), *aside[first:], *aside[:first]):
            if any(sealed.step == step for sealed in one.arena.list_sealed()):
                yield one

    async def free_unneeded(self, ranks: tuple[int, ...]) -> None:
        """Free what was set aside, once each of these ranks has a snapshot of its own."""
        if not self._arenas.list_aside():
            return
        owns = [self._arenas.find_arena(rank) for rank in ranks]
        if all(own is not None and own.arena.list_sealed() for own in owns):
            for path in self._arenas.forget_aside():
                await self._make_arena(self._names.pop(path), 0)
