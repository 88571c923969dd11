"""One rank's snapshots in slots of shared memory; a slot's header is written last, so a torn slot never counts.

    [arena header][slot header and checksums][image] ... [slot header and checksums][image]

Every header and image starts on a page. A slot is a seqlock: its seq is odd while the slot is written and even when the
snapshot is whole. Seqs grow over all slots of the arena, so the largest is the newest. One process writes; any number
of processes read, and a reader announces itself with a pin.
"""

import mmap
import os
import threading
import time
from collections import deque

import msgspec
import xxhash

from holdfast.checkpoint.arena_header import (
    BLOCK_BYTES,
    LAYOUT_BYTES,
    LOW,
    MAGIC,
    MOST_SLOTS,
    PAGE_BYTES,
    VERSION,
    ArenaHeader,
    SlotHeader,
    arena_bytes,
    block_count,
    head_bytes,
    is_alive,
    memory_fence,
    round_to_pages,
)
from holdfast.core.snapshots.slot_pin_limit import can_spare_slot

__all__ = [
    "DUE",
    "POISONED",
    "STORED",
    "VERIFIED",
    "Arena",
    "ArenaError",
    "SealedSnapshot",
    "SlotClaim",
    "SnapshotName",
    "SnapshotSlot",
    "arena_bytes",
]

# Flags of a snapshot. DUE: it is to become a checkpoint; STORED: it was read from one.
VERIFIED, POISONED, DUE, STORED = 1, 2, 4, 8
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python 3.11 has no name for


class ArenaError(Exception):
    """Says in one sentence why this memory is not an arena, or not the expected one."""


class SealedSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that was whole when its header was read. After reading the image, check that `seq` is unchanged."""

    slot: int
    seq: int
    step: int
    generation: int
    flags: int
    at: float  # wall clock


class SnapshotName(msgspec.Struct, frozen=True, kw_only=True):
    """The step, generation and flags that identify a snapshot."""

    step: int
    generation: int
    flags: int = 0


class SlotClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A slot promised to copies that are queued on a GPU. The last copy seals it: the slot's seq becomes `seq` + 1."""

    slot: int
    seq: int
    name: SnapshotName
    at: float


class Arena:
    """One rank's snapshot slots. A reading process must keep a single Arena, because the object counts its pins."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        whole = memoryview(memory)
        head = ArenaHeader(whole[:PAGE_BYTES])
        self.rank, self.world = head.rank, head.world
        self.layout = bytes(whole[ArenaHeader.LAYOUT])
        self.image_bytes, self.slots = head.image_bytes, head.slots
        self.skipped = 0  # snapshots for which no slot was free
        self._whole = whole
        self._heads = [SlotHeader(whole[self.head_at(slot) : self.image_at(slot)]) for slot in range(self.slots)]
        self._claims: deque[SlotClaim] = deque()
        self._pins = [0] * self.slots
        self._lock = threading.Lock()

    @classmethod
    def make(
        cls, place: str | int, *, layout: bytes, image_bytes: int, slots: int, rank: int = 0, world: int = 1
    ) -> "Arena":
        """Create an arena in the file at this path or descriptor; the file's previous content is lost."""
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
        head = ArenaHeader(whole[:PAGE_BYTES])
        head.version, head.slots, head.rank, head.world = VERSION, slots, rank, world
        head.image_bytes, head.slot_bytes = image_bytes, round_to_pages(image_bytes)
        whole[ArenaHeader.LAYOUT] = layout
        arena = cls(memory)
        for slot in arena._heads:
            slot.block_bytes, slot.blocks = BLOCK_BYTES, block_count(image_bytes)
        memory_fence()
        whole[: len(MAGIC)] = MAGIC
        return arena

    @classmethod
    def open(cls, path: str) -> "Arena":
        """Open the arena at this path. Raises ArenaError if the file is missing or is not a valid arena."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise ArenaError(f"there is no arena at {path}: {e.strerror}") from None
        try:
            size = os.fstat(fd).st_size
            if size < PAGE_BYTES:
                raise ArenaError(f"{path} is not an arena: it has {size} bytes")
            memory = mmap.mmap(fd, size)
        except OSError as e:
            raise ArenaError(f"the arena at {path} cannot be mapped: {e.strerror}") from None
        finally:
            os.close(fd)
        if memory[: len(MAGIC)] != MAGIC:
            raise ArenaError(f"{path} is not an arena: it begins with other bytes")
        head = ArenaHeader(memoryview(memory)[:PAGE_BYTES])
        if head.version != VERSION:
            raise ArenaError(f"{path} is an arena of version {head.version}, but this holdfast needs version {VERSION}")
        if not 0 < head.slots <= MOST_SLOTS or size != arena_bytes(head.image_bytes, head.slots):
            raise ArenaError(f"{path} is an arena, but not of the size in its header")
        return cls(memory)

    def head_at(self, slot: int) -> int:
        """Return the offset in the arena at which a slot begins. Raises ArenaError if there is no such slot."""
        if not 0 <= slot < self.slots:
            raise ArenaError(f"there is no slot {slot} in an arena of {self.slots}")
        return PAGE_BYTES + slot * (head_bytes(self.image_bytes) + round_to_pages(self.image_bytes))

    def image_at(self, slot: int) -> int:
        """Return the offset in the arena at which a slot's image begins."""
        return self.head_at(slot) + head_bytes(self.image_bytes)

    def slot_image(self, slot: int) -> memoryview:
        start = self.image_at(slot)
        return self._whole[start : start + self.image_bytes]

    def populate_pages(self) -> None:
        """Fault in every page now, so that no later write waits for one."""
        try:
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages for shared memory: slower, not wrong
        try:
            self.memory.madvise(_POPULATE_WRITE)
        except OSError:  # before Linux 5.14
            for page in range(0, len(self.memory), PAGE_BYTES):
                self.memory[page] = self.memory[page]

    # What the one writer does.

    def begin_slot(self, step: int, generation: int, flags: int = 0) -> "SnapshotSlot | None":
        """Start a snapshot in a slot that nobody reads. Return None if there is no such slot, or while a slot that is
        promised to queued GPU copies is not sealed yet."""
        for slot in self._writable_slots() if self.is_settled() else ():
            head = self._heads[slot]
            before = head.seq
            self._set_seq(slot, self._next_seq())
            if not is_alive(head.pin):
                return SnapshotSlot(self, slot, SnapshotName(step=step, generation=generation, flags=flags))
            self._set_seq(slot, before)  # its reader came first; nothing was written yet
        self.skipped += 1
        return None

    def claim(self, name: SnapshotName, *, spare_newest: bool = False) -> SlotClaim | None:
        """Promise a slot to queued copies; None if no slot is free. The copies must run in the order of their claims.
        With `spare_newest`, the newest whole snapshot is kept until the slots of all earlier claims are sealed."""
        spared = {one.slot for one in self.list_sealed()[:1]} if not self.is_settled() and spare_newest else set[int]()
        for slot in self._writable_slots():
            if slot in spared:
                continue
            head, seq = self._heads[slot], self._next_seq()
            head.writer, head.claim = os.getpid(), (seq + 1) & LOW
            memory_fence()
            if not is_alive(head.pin):
                self._claims.append(SlotClaim(slot=slot, seq=seq, name=name, at=time.time()))
                return self._claims[-1]
            head.claim = head.seq & LOW
        self.skipped += 1
        return None

    def drop(self, slot: int) -> None:
        """Invalidate the snapshot in this slot."""
        self._set_seq(slot, self._next_seq())

    def drop_after(self, step: int) -> None:
        """Invalidate all snapshots of later steps, because training goes back to this step and makes them anew."""
        for sealed in self.list_sealed():
            if sealed.step > step:
                self.drop(sealed.slot)

    def is_settled(self) -> bool:
        """Return whether every slot that was promised to queued GPU copies is sealed."""
        while self._claims and self._heads[self._claims[0].slot].seq > self._claims[0].seq:
            self._claims.popleft()
        return not self._claims

    def _writable_slots(self) -> list[int]:
        """List the slots that may be overwritten, least valuable first.

        The slot of the newest snapshot is left out: the slot claimed last, else the newest whole one. It is listed only
        if readers have pinned all other slots, and another snapshot is whole.
        """
        whole = [sealed for sealed in self.list_sealed() if not sealed.flags & POISONED]
        ahead = {claim.slot: claim.seq for claim in self._claims}
        newest = self._claims[-1].slot if self._claims else next((sealed.slot for sealed in whole), -1)
        open_ = [slot for slot in range(self.slots) if not is_alive(self._heads[slot].pin)]
        if open_ == [newest] and newest not in ahead and len(whole) > 1:
            return open_
        worth = {sealed.slot: sealed.seq for sealed in whole} | ahead
        return sorted((slot for slot in open_ if slot != newest), key=lambda slot: worth.get(slot, 0))

    def _next_seq(self) -> int:
        newest = max([head.seq for head in self._heads] + [claim.seq for claim in self._claims])
        return (newest + 1) | 1

    def _set_seq(self, slot: int, seq: int) -> None:
        memory_fence()
        self._heads[slot].seq = seq
        memory_fence()

    # What readers do.

    def slot_seq(self, slot: int) -> int:
        return self._heads[slot].seq

    def list_sealed(self) -> tuple[SealedSnapshot, ...]:
        """Return every whole snapshot, newest first."""
        found = [sealed for slot in range(self.slots) if (sealed := self._read_sealed(slot))]
        return tuple(sorted(found, key=lambda sealed: -sealed.seq))

    def _read_sealed(self, slot: int) -> SealedSnapshot | None:
        head = self._heads[slot]
        seq = head.seq
        memory_fence()
        name = {"step": head.step, "generation": head.generation}
        looked = SealedSnapshot(slot=slot, seq=seq, flags=head.flags, at=head.at, **name)
        memory_fence()
        return looked if seq and seq % 2 == 0 and head.seq == seq else None

    def pin(self, slot: int, seq: int) -> bool:
        """Pin this snapshot, so that the writer does not overwrite it until `unpin`. Return False if the slot holds
        another snapshot by now, or is claimed for the next one."""
        head = self._heads[slot]
        with self._lock:
            self._pins[slot] += 1
            head.pin = os.getpid()
            memory_fence()
            ahead = (head.claim - head.seq) & LOW  # more than 0: queued work will write here
            if head.seq == seq and not (0 < ahead < LOW // 2 and is_alive(head.writer)):
                return True
            self._drop_pin(slot)
            return False

    def count_pinned(self) -> int:
        """Return the number of slots that live processes have pinned."""
        return sum(is_alive(head.pin) for head in self._heads)

    def can_pin(self, *, late: bool = False) -> bool:
        return can_spare_slot(self.slots, self.count_pinned(), late=late)

    def pin_own(self, slot: int) -> None:
        """Pin a slot that the calling writer has just begun or claimed; `unpin` ends the pin."""
        with self._lock:
            self._pins[slot] += 1
            self._heads[slot].pin = os.getpid()

    def unpin(self, slot: int) -> None:
        with self._lock:
            self._drop_pin(slot)

    def _drop_pin(self, slot: int) -> None:
        self._pins[slot] = max(0, self._pins[slot] - 1)
        if not self._pins[slot]:
            self._heads[slot].pin = 0

    def flag_slot(self, slot: int, flag: int) -> None:
        """Set a flag, VERIFIED or POISONED, on a whole snapshot. The slot's next snapshot starts without it."""
        self._heads[slot].flags |= flag

    def write_checksums(self, slot: int) -> tuple[int, ...]:
        """Compute, store and return a snapshot's checksums. Return () if the snapshot is not whole or has changed."""
        head = self._heads[slot]
        seq = head.seq
        if seq % 2 or not seq:
            return ()
        sums = self._compute_checksums(slot)
        memory_fence()
        if head.seq != seq:
            return ()
        table = head.checksum_table(self.image_bytes)
        for block, value in enumerate(sums):
            table[block] = value
        memory_fence()
        head.checked = seq & LOW
        return sums

    def read_checksums(self, slot: int) -> tuple[int, ...]:
        """Return the checksums stored with a snapshot; () if none were computed yet."""
        head = self._heads[slot]
        kept = head.seq and not head.seq % 2 and head.checked == head.seq & LOW
        return tuple(head.checksum_table(self.image_bytes)) if kept else ()

    def verify(self, slot: int) -> str:
        """Return one sentence on what is wrong with a snapshot; empty if it is intact or has no checksums."""
        head = self._heads[slot]
        seq, step = head.seq, head.step
        if seq % 2 or not seq:
            return f"slot {slot} holds no whole snapshot"
        kept = self.read_checksums(slot)
        for block, (was, found) in enumerate(zip(kept, self._compute_checksums(slot) if kept else (), strict=True)):
            if was != found:
                return f"slot {slot}, step {step}: block {block} is not as it was sealed"
        return "" if head.seq == seq else f"slot {slot} was written meanwhile"

    def _compute_checksums(self, slot: int) -> tuple[int, ...]:
        image = self.slot_image(slot)
        starts = range(0, self.image_bytes, BLOCK_BYTES)
        return tuple(xxhash.xxh3_64_intdigest(image[start : start + BLOCK_BYTES]) for start in starts)


class SnapshotSlot:
    """A slot that is being written. If the rank dies before `seal`, the slot stays torn and is reused first."""

    def __init__(self, arena: Arena, index: int, name: SnapshotName) -> None:
        self._arena = arena
        self.index = index
        self.name = name

    @property
    def image(self) -> memoryview:
        return self._arena.slot_image(self.index)

    def seal(self) -> None:
        """Mark the image as whole by writing the slot's header."""
        head = self._arena._heads[self.index]
        head.step, head.generation, head.flags = self.name.step, self.name.generation, self.name.flags
        head.at = time.time()
        self._arena._set_seq(self.index, head.seq + 1)
