"""Hashes the state that replicas share, from their snapshots. This needs no torch and does not delay the ranks. A
snapshot is all of one step, while a rank's memory may be half updated. The states to hash are every n-th step, the
state that a generation resumes from, and the next floor: a step at which replicas differ must not become the floor."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from hashlib import blake2b

import msgspec
import xxhash

from holdfast.agent.snapshots.arena_table import ArenaTable, pin_snapshot
from holdfast.agent.snapshots.keeper_interfaces import KeeperNotes
from holdfast.checkpoint.arena import Arena, SealedSnapshot
from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.core.detect.replica import ReplicaLimits, hash_stride
from holdfast.decoding import make_decoder
from holdfast.model.observation import Mark
from holdfast.wire.rank_keeper_messages import ArenaRequest, layout_file_name

_LOOK_S = 0.02
_IDLE_S = 0.2
_DONE = 64  # snapshots that are remembered as hashed
_PARTS = {"optimizer": "optimizer state"}  # by where it stands in the state dict; all else is parameters
_decode = make_decoder(msgspec.msgpack.Decoder(ImageLayout))


class SharedPart(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters, or the optimizer state, that a rank shares with all ranks of one replica group."""

    group: str
    count: int
    name: str
    ranges: tuple[tuple[int, int], ...]  # bytes of the image


def shared_parts(layout: ImageLayout) -> tuple[SharedPart, ...]:
    """Return the tensors that replicas share at every step. Plain values are left out: their padding may be stale."""
    found: dict[tuple[tuple[int, ...], str], list[tuple[int, int]]] = {}
    for item in layout.items:
        spec = item.spec
        if len(spec.replicas) > 1 and spec.alike and spec.dtype and spec.bytes:
            name = _PARTS.get(str(spec.path[0]), "parameters")
            ranges = found.setdefault((spec.replicas, name), [])
            ranges.append((item.payload, item.payload + spec.bytes))
    return tuple(
        SharedPart(group=_group_id(replicas), count=len(replicas), name=name, ranges=tuple(ranges))
        for (replicas, name), ranges in found.items()
    )


def hash_part(image: memoryview, part: SharedPart) -> int:
    made = xxhash.xxh3_64()
    for start, end in part.ranges:
        made.update(image[start:end])
    return made.intdigest()


def _group_id(replicas: tuple[int, ...]) -> str:
    return blake2b(msgspec.msgpack.encode(replicas), digest_size=8).hexdigest()


class ReplicaHasher:
    def __init__(
        self,
        arenas: ArenaTable,
        notes: KeeperNotes,
        limits: ReplicaLimits,
        report_marks: Callable[[tuple[Mark, ...]], None],
        next_floor: Callable[[], Mapping[int, int]],  # rank -> seq of the snapshot that will become the floor
    ) -> None:
        self._arenas = arenas
        self._notes = notes
        self._limits = limits
        self._report_marks = report_marks
        self._next_floor = next_floor
        self._generation = 0
        self._parts: dict[int, tuple[SharedPart, ...]] = {}
        self._done: deque[tuple[int, int]] = deque(maxlen=_DONE)  # rank and seq
        self._first: SealedSnapshot | None = None  # of this generation
        self._cost_s = 0.0  # to hash one step of all ranks here
        self.stride = limits.every

    def begin_generation(self, generation: int) -> None:
        self._generation, self._first, self.stride = generation, None, self._limits.every
        self._parts.clear()
        self._done.clear()

    def on_want(self, want: ArenaRequest) -> None:
        """Note which parts of a rank's state are shared, from the layout that the rank has written."""
        if not self._limits.every:
            return
        with contextlib.suppress(OSError, msgspec.DecodeError):
            layout = _decode(self._notes.read_note(layout_file_name(want.rank, want.layout)))
            if parts := shared_parts(layout):
                self._parts[want.rank] = parts

    @property
    def is_comparing(self) -> bool:
        return bool(self._parts)

    async def run(self) -> None:
        while True:
            for rank, one in [(rank, one) for rank in self._parts if (one := self._due_snapshot(rank))]:
                self._done.append((rank, one.seq))
                generation = self._generation
                marks = await asyncio.to_thread(self._hash_snapshot, self._arena_of(rank), one)
                if marks and generation == self._generation:
                    self._report_marks(marks)
            await asyncio.sleep(_LOOK_S if self._parts else _IDLE_S)

    def _due_snapshot(self, rank: int) -> SealedSnapshot | None:
        """Return the newest snapshot that is due for hashing, or None. Replicas may soon overwrite older ones."""
        sealed, next_seq = self._arena_of(rank).list_sealed(), self._next_floor().get(rank)
        self._adjust_stride(sealed)
        for one in sealed:
            if (rank, one.seq) in self._done:
                continue
            gone_on_from = one.generation < self._generation and one is sealed[0]
            own = one.generation == self._generation and one.step % self.stride == 0
            if own or gone_on_from or one.seq == next_seq:
                return one
        return None

    def _adjust_stride(self, sealed: tuple[SealedSnapshot, ...]) -> None:
        newest = sealed[0] if sealed and sealed[0].generation == self._generation else None
        self._first = self._first or newest
        if newest and self._first and newest.step > self._first.step and newest.at > self._first.at:
            step_s = (newest.at - self._first.at) / (newest.step - self._first.step)
            self.stride = hash_stride(self._limits, self._cost_s * len(self._parts), step_s)

    def _arena_of(self, rank: int) -> Arena:
        own = self._arenas.find_arena(rank)
        assert own is not None, "a rank has parts only once it has an arena"
        return own.arena

    def _hash_snapshot(self, arena: Arena, one: SealedSnapshot) -> tuple[Mark, ...]:
        """Return the hashes of one snapshot; empty if the snapshot was overwritten meanwhile."""
        rank, parts = arena.rank, self._parts.get(arena.rank, ())
        pinned = pin_snapshot(arena, one) if arena.can_pin() else None  # else it is read in the hope that nobody writes
        began_at = time.thread_time()
        try:
            image = arena.slot_image(one.slot)
            values = [(part, hash_part(image, part)) for part in parts]
            whole = arena.slot_seq(one.slot) == one.seq
        finally:
            if pinned:
                pinned.release()
        self._cost_s = max(self._cost_s / 2, time.thread_time() - began_at)
        if not whole:
            return ()
        return tuple(Mark(rank, one.step, part.group, part.count, part.name, value) for part, value in values)
