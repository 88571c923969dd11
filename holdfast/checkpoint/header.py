"""The binary form of an arena: where its words lie, how large it is, and in which order its words are seen.

Words are aligned and little-endian, so that a processor writes each of them at once.
"""

import os
from threading import Lock
from typing import Any, Generic, TypeVar, cast, overload

PAGE_BYTES = 4096
BLOCK_BYTES = 8 << 20  # what one checksum covers
LAYOUT_BYTES = 32
MOST_SLOTS = 1 << 10  # more than anybody is granted
MAGIC = b"HFARENA1"
VERSION = 1
LOW = 0xFFFFFFFF
_MOST_PID = 0x7FFFFFFF

N = TypeVar("N", int, float)


class Word(Generic[N]):
    """One word of a header, by its struct code and its offset."""

    def __init__(self, code: str, offset: int) -> None:
        self.code = code
        self.offset = offset
        self._index = offset // (4 if code == "I" else 8)

    @overload
    def __get__(self, head: None, owner: type) -> "Word[N]": ...
    @overload
    def __get__(self, head: "ArenaHead | SlotHead", owner: type) -> N: ...
    def __get__(self, head: "ArenaHead | SlotHead | None", owner: type) -> "Word[N] | N":
        return self if head is None else cast(N, head.views[self.code][self._index])

    def __set__(self, head: "ArenaHead | SlotHead", value: N) -> None:
        head.views[self.code][self._index] = value


def _views(memory: memoryview) -> dict[str, Any]:
    return {"Q": memory.cast("Q"), "q": memory.cast("q"), "d": memory.cast("d"), "I": memory.cast("I")}


class ArenaHead:
    """What an arena starts with, after the magic."""

    version = Word[int]("I", 8)
    slots = Word[int]("I", 12)
    image_bytes = Word[int]("Q", 16)
    slot_bytes = Word[int]("Q", 24)  # image_bytes in whole pages
    rank = Word[int]("I", 32)
    world = Word[int]("I", 36)
    LAYOUT = slice(40, 40 + LAYOUT_BYTES)

    def __init__(self, memory: memoryview) -> None:
        self.views = _views(memory)


class SlotHead:
    """What a slot starts with."""

    seq = Word[int]("Q", 0)  # odd while it is written
    step = Word[int]("q", 8)
    generation = Word[int]("q", 16)
    at = Word[float]("d", 24)  # wall clock
    flags = Word[int]("I", 32)
    pin = Word[int]("I", 36)  # the process that reads
    block_bytes = Word[int]("Q", 40)
    blocks = Word[int]("I", 48)
    checked = Word[int]("I", 52)  # low bits of the seq that the checksums belong to
    claim = Word[int]("I", 56)  # low bits of the seq that queued work will seal this slot with
    writer = Word[int]("I", 60)  # whose work that is
    TABLE = 64  # the checksums, 8 bytes each

    def __init__(self, memory: memoryview) -> None:
        self.views = _views(memory)

    def table(self, image_bytes: int) -> memoryview:
        """As many as an image of this size has blocks; what the slot itself says may be damaged."""
        start = self.TABLE // 8
        found: memoryview = self.views["Q"][start : start + block_count(image_bytes)]
        return found


def arena_bytes(image_bytes: int, slots: int) -> int:
    """What an arena takes."""
    return PAGE_BYTES + slots * (head_bytes(image_bytes) + pages(image_bytes))


def head_bytes(image_bytes: int) -> int:
    """A slot's header with its checksums."""
    return pages(SlotHead.TABLE + 8 * block_count(image_bytes))


def block_count(image_bytes: int) -> int:
    return -(-image_bytes // BLOCK_BYTES)


def pages(size: int) -> int:
    """Rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def fence() -> None:
    """What was written before is seen before what is written after.

    Python has no memory barriers, but POSIX makes taking and giving back a lock one each way. Nobody else knows this
    lock, so nobody is waited for.
    """
    lock = Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


def lives(pid: int) -> bool:
    """Whether there is such a process: what a dead one has pinned or claimed holds nobody up."""
    if not 0 < pid <= _MOST_PID:  # what lies in a damaged slot is nobody
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
