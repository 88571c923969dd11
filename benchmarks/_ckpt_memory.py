"""What snapshots take of memory, as the kernel counts it: arenas, and whatever grows from save to save."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec

ARENA = "memfd:holdfast"
_KB = 1024


class Memory(msgspec.Struct, kw_only=True):
    """Bytes of one rank: of its arenas, and by how much it grew over some saves."""

    arenas: int
    anonymous: int
    shared: int


def grown(save: Callable[[], object], saves: int) -> Memory:
    """Everything was saved before, so all that is ever needed is there."""
    before = _counted()
    for _ in range(saves):
        save()
    after = _counted()
    return Memory(arenas=arenas(), anonymous=after[0] - before[0], shared=after[1] - before[1])


def arenas() -> int:
    maps = Path("/proc/self/maps").read_text()
    found = re.findall(rf"^([0-9a-f]+)-([0-9a-f]+) .*{ARENA}", maps, re.MULTILINE)
    return sum(int(end, 16) - int(start, 16) for start, end in found)


def _counted() -> tuple[int, int]:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    counted = {name: int(count) * _KB for name, count in re.findall(r"^(\w+): +(\d+) kB", rollup, re.MULTILINE)}
    return counted["Pss_Anon"], counted["Pss_Shmem"]
