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


class HeaderWord(Generic[N]):
    """One word of a header, by its struct code and its offset."""

    def __init__(self, code: str, offset: int) -> None:
        self.code = code
        self.offset = offset
        self._index = offset // (4 if code == "I" else 8)

    @overload
    def __get__(self, head: None, owner: type) -> "HeaderWord[N]": ...
    @overload
    def __get__(self, head: "ArenaHeader | SlotHeader", owner: type) -> N: ...
    def __get__(self, head: "ArenaHeader | SlotHeader | None", owner: type) -> "HeaderWord[N] | N":
        return self if head is None else cast(N, head.views[self.code][self._index])

    def __set__(self, head: "ArenaHeader | SlotHeader", value: N) -> None:
        head.views[self.code][self._index] = value


def _typed_views(memory: memoryview) -> dict[str, Any]:
    return {"Q": memory.cast("Q"), "q": memory.cast("q"), "d": memory.cast("d"), "I": memory.cast("I")}


class ArenaHeader:
    """What an arena starts with, after the magic."""

    version = HeaderWord[int]("I", 8)
    slots = HeaderWord[int]("I", 12)
    image_bytes = HeaderWord[int]("Q", 16)
    slot_bytes = HeaderWord[int]("Q", 24)  # image_bytes in whole pages
    rank = HeaderWord[int]("I", 32)
    world = HeaderWord[int]("I", 36)
    LAYOUT = slice(40, 40 + LAYOUT_BYTES)

    def __init__(self, memory: memoryview) -> None:
        self.views = _typed_views(memory)


class SlotHeader:
    """What a slot starts with."""

    seq = HeaderWord[int]("Q", 0)  # odd while it is written
    step = HeaderWord[int]("q", 8)
    generation = HeaderWord[int]("q", 16)
    at = HeaderWord[float]("d", 24)  # wall clock
    flags = HeaderWord[int]("I", 32)
    pin = HeaderWord[int]("I", 36)  # the process that reads
    block_bytes = HeaderWord[int]("Q", 40)
    blocks = HeaderWord[int]("I", 48)
    checked = HeaderWord[int]("I", 52)  # low bits of the seq that the checksums belong to
    claim = HeaderWord[int]("I", 56)  # low bits of the seq that queued work will seal this slot with
    writer = HeaderWord[int]("I", 60)  # whose work that is
    TABLE = 64  # the checksums, 8 bytes each

    def __init__(self, memory: memoryview) -> None:
        self.views = _typed_views(memory)

    def checksum_table(self, image_bytes: int) -> memoryview:
        """As many as an image of this size has blocks; what the slot itself says may be damaged."""
        start = self.TABLE // 8
        found: memoryview = self.views["Q"][start : start + block_count(image_bytes)]
        return found


def arena_bytes(image_bytes: int, slots: int) -> int:
    """What an arena takes."""
    return PAGE_BYTES + slots * (head_bytes(image_bytes) + round_to_pages(image_bytes))


def head_bytes(image_bytes: int) -> int:
    """A slot's header with its checksums."""
    return round_to_pages(SlotHeader.TABLE + 8 * block_count(image_bytes))


def block_count(image_bytes: int) -> int:
    return -(-image_bytes // BLOCK_BYTES)


def round_to_pages(size: int) -> int:
    """Rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def memory_fence() -> None:
    """What was written before is seen before what is written after.

    Python has no memory barriers, but POSIX makes taking and giving back a lock one each way. Nobody else knows this
    lock, so nobody is waited for.
    """
    lock = Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


def is_alive(pid: int) -> bool:
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
