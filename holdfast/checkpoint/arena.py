"""The memory in which one rank's snapshots lie: slots, each sealed by its header last, so that a torn one is never taken.

    [arena header][slot header and checksums][image] ... [slot header and checksums][image]

All parts start on a page. A slot is a seqlock: its number is odd while it is written, even when it is whole, and grows
over all slots of the arena, so the largest is the newest. One process writes; any number read, and say so by a pin.
"""

import mmap
import os
import threading
import time
from collections import deque

import msgspec
import xxhash

PAGE_BYTES = 4096
BLOCK_BYTES = 8 << 20  # what one checksum covers
VERIFIED, POISONED = 1, 2

_MAGIC = b"HFARENA1"
_VERSION = 1
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python 3.11 has no name for

# Offsets of the arena's header, and of a slot's. Words are aligned, so that the processor writes each at once.
_AT_VERSION, _AT_SLOTS, _AT_IMAGE, _AT_SLOT, _AT_RANK, _AT_WORLD, _AT_LAYOUT = 8, 12, 16, 24, 32, 36, 40
LAYOUT_BYTES = 32
SEQ, STEP, GENERATION, WALL, FLAGS, PIN, _BLOCK, _BLOCKS, _CHECKED, _CLAIM, _WRITER, _TABLE = (
    *(0, 8, 16, 24, 32, 36),  # pin: the process that reads
    *(40, 48, 52),  # checked: low bits of the seq that the checksums belong to
    *(56, 60, 64),  # claim: low bits of the seq that the writer will seal this slot with
)
_LOW = 0xFFFFFFFF


class ArenaError(Exception):
    """One sentence: why this memory is no arena, or not the one it should be."""


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that was whole when it was looked at; whoever reads it looks at its seq again afterwards."""

    slot: int
    seq: int
    step: int
    generation: int
    flags: int
    at: float  # wall clock


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A slot promised to work that is queued on a device, which writes these words itself, in this order."""

    slot: int
    seq: int  # odd, before the first byte of the image
    step: int
    generation: int
    at: float


def arena_bytes(image_bytes: int, slots: int) -> int:
    """What an arena takes."""
    return PAGE_BYTES + slots * (_head_bytes(image_bytes) + _pages(image_bytes))


class Arena:
    """One rank's slots. Objects are not shared by threads, but for pin and unpin; a process that reads keeps one."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        whole = memoryview(memory)
        self._bytes, self._u64, self._i64 = whole, whole.cast("Q"), whole.cast("q")
        self._u32, self._f64 = whole.cast("I"), whole.cast("d")
        self.slots = self._u32[_AT_SLOTS // 4]
        self.image_bytes = self._u64[_AT_IMAGE // 8]
        self.rank, self.world = self._u32[_AT_RANK // 4], self._u32[_AT_WORLD // 4]
        self.layout = bytes(whole[_AT_LAYOUT : _AT_LAYOUT + LAYOUT_BYTES])
        self.skipped = 0  # snapshots for which no slot was free
        self._claims: deque[Claim] = deque()
        self._pins = [0] * self.slots
        self._lock = threading.Lock()

    @classmethod
    def make(
        cls, place: str | int, *, layout: bytes, image_bytes: int, slots: int, rank: int = 0, world: int = 1
    ) -> "Arena":
        """A new arena in the file at this path or descriptor; whatever was there is lost."""
        if len(layout) != LAYOUT_BYTES or image_bytes < 0 or slots < 1:
            raise ArenaError(f"an arena of {slots} slots of {image_bytes} bytes cannot be made")
        fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) if isinstance(place, str) else os.dup(place)
        try:
            os.ftruncate(fd, 0)
            os.ftruncate(fd, arena_bytes(image_bytes, slots))
            memory = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        whole = memoryview(memory)
        u32, u64 = whole.cast("I"), whole.cast("Q")
        u32[_AT_VERSION // 4], u32[_AT_SLOTS // 4] = _VERSION, slots
        u64[_AT_IMAGE // 8], u64[_AT_SLOT // 8] = image_bytes, _pages(image_bytes)
        u32[_AT_RANK // 4], u32[_AT_WORLD // 4] = rank, world
        whole[_AT_LAYOUT : _AT_LAYOUT + LAYOUT_BYTES] = layout
        arena = cls(memory)
        for slot in range(slots):
            u64[arena.at(slot, _BLOCK) // 8] = BLOCK_BYTES
            u32[arena.at(slot, _BLOCKS) // 4] = _blocks(image_bytes)
        _fence()
        whole[: len(_MAGIC)] = _MAGIC
        return arena

    @classmethod
    def open(cls, path: str) -> "Arena":
        """The arena at this path."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise ArenaError(f"there is no arena at {path}: {e.strerror}") from None
        try:
            size = os.fstat(fd).st_size
            if size < PAGE_BYTES:
                raise ArenaError(f"{path} is no arena: it has {size} bytes")
            memory = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        if memory[: len(_MAGIC)] != _MAGIC:
            raise ArenaError(f"{path} is no arena: it starts with other bytes")
        u32, u64 = memoryview(memory).cast("I"), memoryview(memory).cast("Q")
        if u32[_AT_VERSION // 4] != _VERSION:
            raise ArenaError(f"{path} is an arena of version {u32[_AT_VERSION // 4]}, and this is version {_VERSION}")
        if size != arena_bytes(u64[_AT_IMAGE // 8], u32[_AT_SLOTS // 4]):
            raise ArenaError(f"{path} is an arena of another size than its header says")
        return cls(memory)

    @property
    def memory(self) -> mmap.mmap:
        return self._memory

    def at(self, slot: int, word: int = 0) -> int:
        """Where a word of a slot's header lies in the arena."""
        if not 0 <= slot < self.slots:
            raise ArenaError(f"the arena has no slot {slot}, it has {self.slots}")
        return PAGE_BYTES + slot * (_head_bytes(self.image_bytes) + _pages(self.image_bytes)) + word

    def image_at(self, slot: int) -> int:
        return self.at(slot) + _head_bytes(self.image_bytes)

    def image(self, slot: int) -> memoryview:
        start = self.image_at(slot)
        return self._bytes[start : start + self.image_bytes]

    def touch(self) -> None:
        """Have every page at hand now, so that no later write waits for one."""
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages for shared memory: slower, not wrong
        try:
            self._memory.madvise(_POPULATE_WRITE)
        except OSError:  # before Linux 5.14
            for page in range(0, len(self._memory), PAGE_BYTES):
                self._memory[page] = self._memory[page]

    # What the one writer does.

    def begin(self, step: int, generation: int) -> "Slot | None":
        """A slot to write; never the newest whole one, never one that is read. None: skip this snapshot."""
        if self._settled():
            for slot in self._free():
                before = self.seq(slot)
                self._set_seq(slot, self._next_seq())
                if not self._is_pinned(slot):
                    return Slot(self, slot, step=step, generation=generation)
                self._set_seq(slot, before)  # its reader came first; nothing was written yet
        self.skipped += 1
        return None

    def claim(self, step: int, generation: int) -> Claim | None:
        """Promise a slot to queued work that runs in the order of claims; when it starts, the claim before is sealed."""
        self._settled()
        for slot in self._free():
            seq = self._next_seq()
            self._u32[self.at(slot, _WRITER) // 4] = os.getpid()
            self._u32[self.at(slot, _CLAIM) // 4] = (seq + 1) & _LOW
            _fence()
            if not self._is_pinned(slot):
                self._claims.append(Claim(slot=slot, seq=seq, step=step, generation=generation, at=time.time()))
                return self._claims[-1]
            self._u32[self.at(slot, _CLAIM) // 4] = self.seq(slot) & _LOW
        self.skipped += 1
        return None

    def drop(self, slot: int) -> None:
        """This snapshot is not to be taken any more."""
        self._set_seq(slot, self._next_seq())

    def _settled(self) -> bool:
        """Whether all claimed slots are sealed."""
        while self._claims and self.seq(self._claims[0].slot) > self._claims[0].seq:
            self._claims.popleft()
        return not self._claims

    def _free(self) -> list[int]:
        """Slots that may be written, the one that is missed least first."""
        whole = [sealed for sealed in self.sealed() if not sealed.flags & POISONED]
        ahead = {claim.slot: claim.seq for claim in self._claims}
        kept = {self._claims[-1].slot} if self._claims else {sealed.slot for sealed in whole[:1]}
        if self.slots > 2:
            kept |= {sealed.slot for sealed in whole if sealed.flags & VERIFIED and sealed.slot not in ahead} & {
                next((sealed.slot for sealed in whole if sealed.flags & VERIFIED), -1)
            }
        worth = {sealed.slot: sealed.seq for sealed in whole} | ahead
        free = [slot for slot in range(self.slots) if slot not in kept and not self._is_pinned(slot)]
        return sorted(free, key=lambda slot: worth.get(slot, 0))

    def _next_seq(self) -> int:
        newest = max([self.seq(slot) for slot in range(self.slots)] + [claim.seq for claim in self._claims])
        return (newest + 1) | 1

    def _set_seq(self, slot: int, seq: int) -> None:
        _fence()
        self._u64[self.at(slot, SEQ) // 8] = seq
        _fence()

    def _seal(self, slot: int, step: int, generation: int) -> None:
        self._i64[self.at(slot, STEP) // 8] = step
        self._i64[self.at(slot, GENERATION) // 8] = generation
        self._f64[self.at(slot, WALL) // 8] = time.time()
        self._u32[self.at(slot, FLAGS) // 4] = 0
        self._set_seq(slot, self.seq(slot) + 1)

    # What readers do.

    def seq(self, slot: int) -> int:
        return self._u64[self.at(slot, SEQ) // 8]

    def sealed(self) -> tuple[Sealed, ...]:
        """Every whole snapshot, newest first."""
        found = [sealed for slot in range(self.slots) if (sealed := self._look(slot))]
        return tuple(sorted(found, key=lambda sealed: -sealed.seq))

    def _look(self, slot: int) -> Sealed | None:
        seq = self.seq(slot)
        _fence()
        looked = Sealed(
            slot=slot,
            seq=seq,
            step=self._i64[self.at(slot, STEP) // 8],
            generation=self._i64[self.at(slot, GENERATION) // 8],
            flags=self._u32[self.at(slot, FLAGS) // 4],
            at=self._f64[self.at(slot, WALL) // 8],
        )
        _fence()
        return looked if seq and seq % 2 == 0 and self.seq(slot) == seq else None

    def pin(self, slot: int, seq: int) -> bool:
        """Keep the writer away from this snapshot until unpin; False if it is another one by now."""
        with self._lock:
            self._pins[slot] += 1
            self._u32[self.at(slot, PIN) // 4] = os.getpid()
            _fence()
            if self.seq(slot) == seq and not self._is_claimed(slot):
                return True
            self._unpin(slot)
            return False

    def unpin(self, slot: int) -> None:
        with self._lock:
            self._unpin(slot)

    def flag(self, slot: int, flag: int) -> None:
        """Mark a whole snapshot as VERIFIED or POISONED; the writer clears marks when it writes the next one."""
        at = self.at(slot, FLAGS) // 4
        self._u32[at] = self._u32[at] | flag

    def check(self, slot: int) -> tuple[int, ...]:
        """The checksums of a snapshot, computed and kept with it; () if it changed meanwhile."""
        seq = self.seq(slot)
        sums = self._sums(slot)
        _fence()
        if seq % 2 or self.seq(slot) != seq:
            return ()
        table = self.at(slot, _TABLE) // 8
        for number, value in enumerate(sums):
            self._u64[table + number] = value
        _fence()
        self._u32[self.at(slot, _CHECKED) // 4] = seq & _LOW
        return sums

    def checked(self, slot: int) -> tuple[int, ...]:
        """The checksums kept with this snapshot; () if none were computed yet."""
        seq, table = self.seq(slot), self.at(slot, _TABLE) // 8
        if seq % 2 or not seq or self._u32[self.at(slot, _CHECKED) // 4] != seq & _LOW:
            return ()
        return tuple(self._u64[table : table + _blocks(self.image_bytes)])

    def verify(self, slot: int) -> str:
        """What is wrong with a snapshot, in one sentence; empty if nothing is, or if there is nothing to go by."""
        seq = self.seq(slot)
        if seq % 2 or not seq:
            return f"slot {slot} holds no whole snapshot"
        for block, (kept, found) in enumerate(zip(self.checked(slot), self._sums(slot), strict=False)):
            if kept != found:
                return f"slot {slot}, step {self._i64[self.at(slot, STEP) // 8]}: block {block} is not as it was sealed"
        return "" if self.seq(slot) == seq else f"slot {slot} was written meanwhile"

    def _sums(self, slot: int) -> tuple[int, ...]:
        image = self.image(slot)
        return tuple(
            xxhash.xxh3_64_intdigest(image[start : start + BLOCK_BYTES])
            for start in range(0, self.image_bytes, BLOCK_BYTES)
        )

    def _unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if self._pins[slot] <= 0:
            self._pins[slot] = 0
            self._u32[self.at(slot, PIN) // 4] = 0

    def _is_pinned(self, slot: int) -> bool:
        return _lives(self._u32[self.at(slot, PIN) // 4])

    def _is_claimed(self, slot: int) -> bool:
        """Whether queued work of a live process will write this slot next."""
        ahead = (self._u32[self.at(slot, _CLAIM) // 4] - self.seq(slot)) & _LOW
        return 0 < ahead < _LOW // 2 and _lives(self._u32[self.at(slot, _WRITER) // 4])


class Slot:
    """A slot that is being written. Left alone, as by a rank that dies here, it stays torn and is the first to be reused."""

    def __init__(self, arena: Arena, index: int, *, step: int, generation: int) -> None:
        self._arena = arena
        self.index = index
        self._name = (step, generation)

    @property
    def image(self) -> memoryview:
        return self._arena.image(self.index)

    def seal(self) -> None:
        """The image is whole."""
        self._arena._seal(self.index, *self._name)


def _lives(pid: int) -> bool:
    """A pin or claim of a process that died holds nobody up."""
    if not pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


_order = threading.Lock()


def _fence() -> None:
    """What was written before is seen before what is written after: POSIX says so of locks, twice makes it both ways."""
    with _order:
        pass
    with _order:
        pass


def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _blocks(image_bytes: int) -> int:
    return -(-image_bytes // BLOCK_BYTES)


def _head_bytes(image_bytes: int) -> int:
    return _pages(_TABLE + 8 * _blocks(image_bytes))
