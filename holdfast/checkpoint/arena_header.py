"""The binary format of an arena: offsets of header fields, sizes, and the memory fence that orders writes.

Words are aligned, so that a processor writes each of them whole and no reader sees half of one.
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
    """A descriptor for one header field, given by struct code and byte offset."""

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
    """The fields at the start of an arena, after the magic."""

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
    """The fields at the start of a slot."""

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
        """Return the checksum table of an image of this size. The slot's own count may be damaged and is not used."""
        start = self.TABLE // 8
        found: memoryview = self.views["Q"][start : start + block_count(image_bytes)]
        return found


def arena_bytes(image_bytes: int, slots: int) -> int:
    """Return the size of an arena with this many slots."""
    return PAGE_BYTES + slots * (head_bytes(image_bytes) + round_to_pages(image_bytes))


def head_bytes(image_bytes: int) -> int:
    """Return the size of a slot's header including its checksums, in whole pages."""
    return round_to_pages(SlotHeader.TABLE + 8 * block_count(image_bytes))


def block_count(image_bytes: int) -> int:
    return -(-image_bytes // BLOCK_BYTES)


def round_to_pages(size: int) -> int:
    """Round a size up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def memory_fence() -> None:
    """Make earlier writes visible before later ones.

    Python has no memory barriers, but POSIX makes locking and unlocking a mutex act as one. A local lock never blocks.
    """
    lock = Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


def is_alive(pid: int) -> bool:
    """Return whether this process exists; pins and claims of a dead process do not count."""
    if not 0 < pid <= _MOST_PID:  # what lies in a damaged slot is nobody
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
