"""Arenas in the memory of a simulated holder, and how processes of its machine reach them."""

from collections.abc import Callable, Iterator

from holdfast.checkpoint.arena import Arena, ArenaError, SealedSnapshot
from holdfast.sim.dst.simulated_state_image import StateTruth, read_truths
from holdfast.wire.holder_messages import KeptArena


class HolderMemory:
    """Arenas by name and path. They outlive agents and ranks, but not the machine."""

    def __init__(self) -> None:
        self.kept: dict[str, KeptArena] = {}
        self._bytes: dict[str, bytearray] = {}  # by path
        self._count = 0

    def make_arena(self, name: str, size: int) -> str:
        """Make an arena of this name, or keep an existing one of the same size; return its path."""
        kept = self.kept.get(name)
        if kept is None or kept.bytes != size:
            self._count += 1
            if kept:
                del self._bytes[kept.path]
            kept = self.kept[name] = KeptArena(name=name, bytes=size, path=f"{name}/{self._count}")
            self._bytes[kept.path] = bytearray(size)
        return kept.path

    def find_bytes(self, path: str) -> bytearray:
        if path not in self._bytes:
            raise ArenaError(f"there is no arena at {path}")
        return self._bytes[path]

    def list_states(self) -> Iterator[tuple[int, SealedSnapshot, StateTruth]]:
        """Yield the rank, the name and the truth of each page of all snapshots and copies."""
        arenas = [Arena(self._bytes[kept.path]) for kept in self.kept.values() if kept.bytes]
        for arena, sealed in [(one, sealed) for one in arenas for sealed in one.list_sealed()]:
            for truth in read_truths(arena.slot_image(sealed.slot)):
                yield arena.rank, sealed, truth


class ProcessArenas:
    """The arenas of a machine as one of its processes opens them; pins of an agent end with it."""

    def __init__(self, memory: HolderMemory, life: int, living: Callable[[], int]) -> None:
        """`life` is the agent's, 0 for a rank, and `living` tells that of the agent that lives, 0 if there is none."""
        self._memory = memory
        self._life = life
        self._living = living

    def own_pid(self) -> int:
        return self._life

    def is_alive(self, pid: int) -> bool:
        return pid > 0 and pid == self._living()

    def make(self, place: str, *, layout: bytes, image_bytes: int, slots: int, rank: int, world: int) -> Arena:
        memory = self._memory.find_bytes(place)
        memory[:] = bytes(len(memory))
        return Arena.format_memory(
            memory, self, layout=layout, image_bytes=image_bytes, slots=slots, rank=rank, world=world
        )

    def open(self, path: str) -> Arena:
        return Arena.adopt_memory(self._memory.find_bytes(path), path, self)
