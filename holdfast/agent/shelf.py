"""What this node holds for others: copies of a peer's snapshots, and answers to whoever gathers a lost rank's state.

Links of other keepers are served in threads, which is why there is a lock. Of a peer's rank there are two slots: the
job's floor, which is held, and the next, which is coming in.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import msgspec

from holdfast.checkpoint.arena import Arena, ArenaError, Sealed, Slot, arena_bytes
from holdfast.checkpoint.layout import Layout
from holdfast.checkpoint.transport import Ask, Holding
from holdfast.wire import spec
from holdfast.wire.holding import KeptArena
from holdfast.wire.keeping import plan_name

NO_PLAN = "the layout is not known here"
PREFIX = "backup-"  # of the names of arenas
_SLOTS = 2
_MAKE_S = 60.0
_PLAN_BYTES = 1 << 28
Given = tuple[Sequence[memoryview], Callable[[], None]]


class Coming(msgspec.Struct):
    """A copy on its way in; a link that broke goes on where it was."""

    slot: Slot
    holding: Holding


class Backup(msgspec.Struct):
    """Copies of one rank's share."""

    path: str
    arena: Arena
    held: Sealed | None = None  # the floor
    coming: Coming | None = None

    def hold(self, step: int) -> None:
        """Keep the copy of this step, and no longer the one held so far."""
        if self.held and self.held.step == step:
            return
        found = next((one for one in self.arena.sealed() if one.step == step), None)
        if found and self.arena.pin(found.slot, found.seq):
            self.release()
            self.held = found

    def release(self) -> None:
        if self.held:
            self.arena.unpin(self.held.slot)
            self.held = None


class Shelf:
    def __init__(
        self, notes: Path, own: dict[int, tuple[str, Arena]], make: Callable[[str, int], Awaitable[str]]
    ) -> None:
        self.say: Callable[[str], None] = lambda text: None
        self.room: Callable[[int], str] = lambda size: ""  # why there is no memory for so many bytes more
        self._notes = notes
        self._own = own
        self._make = make
        self._running: asyncio.AbstractEventLoop | None = None
        self._backups: dict[int, Backup] = {}
        self._plans: dict[tuple[int, str], Layout] = {}
        self._generation = 0
        self._sound: set[tuple[int, bool, int]] = set()  # rank, own, seq: found undamaged in this generation
        self._lock = threading.Lock()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._running = loop

    def recall(self, kept: KeptArena) -> None:
        arena = Arena.open(kept.path)
        self._backups[arena.rank] = Backup(kept.path, arena)

    def launched(self, generation: int, step: int) -> None:
        """What came after the step that the job goes on from belongs to a line that is given up; -1: all of it."""
        with self._lock:
            self._generation = generation
            self._sound.clear()
            for backup in self._backups.values():
                backup.coming = None
                backup.arena.drop_after(step)
                if backup.held and backup.held.step > step:
                    backup.release()

    def copies(self) -> Iterator[tuple[Arena, Sealed, bool]]:
        """Each with whether it is the rank's whole image."""
        with self._lock:
            for rank, backup in self._backups.items():
                plan = self._plan(rank, backup.arena.layout.hex())
                for one in backup.arena.sealed() if plan else ():
                    yield backup.arena, one, plan is not None and plan.image_bytes == backup.arena.image_bytes

    def hold(self, floor: int) -> list[str]:
        """This step is the job's floor now. Copies that lack it belong to nobody: their memory's names are answered."""
        with self._lock:
            left = []
            for rank, backup in list(self._backups.items()):
                backup.hold(floor)
                if (backup.held is None or backup.held.step != floor) and backup.coming is None:
                    backup.release()
                    del self._backups[rank]
                    left.append(f"{PREFIX}{rank}")
            return left

    # --- a peer's copies come in -------------------------------------------------------------------------------

    def take(self, ask: Ask) -> Holding | str:
        if ask.verb == "tell":
            return self._learn(ask)
        plan = self._plan(ask.rank, ask.layout)
        if plan is None:
            return NO_PLAN
        sizes = [part.end - part.start for part in plan.share()]
        if sum(sizes) != ask.bytes:
            return f"a copy has {sum(sizes)} bytes by its layout, not {ask.bytes}"
        try:
            backup = self._backup(ask)
        except (OSError, ArenaError, TimeoutError) as e:
            return f"no memory for a copy: {e}"
        with self._lock:
            if ask.generation != self._generation:
                return f"generation {ask.generation} is over; this node is in {self._generation}"
            self._backups[ask.rank] = backup
            return self._coming(backup, ask, sizes)

    def _learn(self, ask: Ask) -> Holding | str:
        if not 0 < ask.bytes <= _PLAN_BYTES:
            return f"a layout of {ask.bytes} bytes is not taken"
        content = bytearray(ask.bytes)

        def learned() -> None:
            spec.put(self._notes / plan_name(ask.rank, ask.layout), bytes(content))
            self._plans.pop((ask.rank, ask.layout), None)

        return Holding([memoryview(content)], 0, learned)

    def _backup(self, ask: Ask) -> Backup:
        """Not under the lock: the loop, which has the memory made, may want it too."""
        found = self._backups.get(ask.rank)
        wanted = (ask.layout, ask.bytes, ask.world)
        if found and (found.arena.layout.hex(), found.arena.image_bytes, found.arena.world) == wanted:
            return found
        size = arena_bytes(ask.bytes, _SLOTS)
        if why := self.room(size):
            raise ArenaError(why)
        assert self._running is not None
        making = self._make(f"{PREFIX}{ask.rank}", size)
        path = asyncio.run_coroutine_threadsafe(_awaited(making), self._running).result(_MAKE_S)
        layout, world = bytes.fromhex(ask.layout), ask.world
        arena = Arena.make(path, layout=layout, image_bytes=ask.bytes, slots=_SLOTS, rank=ask.rank, world=world)
        return Backup(path, arena)

    def _coming(self, backup: Backup, ask: Ask, sizes: list[int]) -> Holding | str:
        if ask.floor >= 0:
            backup.hold(ask.floor)  # our own word of it may come later than the copy of the next
        coming = backup.coming
        if coming and (coming.slot.name.step, coming.slot.name.generation) == (ask.step, ask.generation):
            return coming.holding
        slot = backup.arena.begin(ask.step, ask.generation)
        if slot is None:
            return "all copies of this rank are in use"
        ends = list(accumulate(sizes))  # both sides cut it into chunks alike
        views = [slot.image[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        backup.coming = Coming(slot, Holding(views, 0, partial(self._arrived, backup, slot)))
        return backup.coming.holding

    def _arrived(self, backup: Backup, slot: Slot) -> None:
        with self._lock:
            if backup.coming and backup.coming.slot is slot:
                slot.seal()
                backup.coming = None
        backup.arena.check(slot.index)

    # --- others fetch ------------------------------------------------------------------------------------------

    def give(self, ask: Ask) -> Given | str:
        """A layout, or bytes of a snapshot: found undamaged before the first of them is sent."""
        if ask.verb == "plan":
            path = self._notes / plan_name(ask.rank, ask.layout)
            return ([memoryview(path.read_bytes())], _nothing) if path.exists() else NO_PLAN
        for arena, own in self._arenas(ask.rank):
            ranges = ask.ranges if own else self._compact(ask)
            given = self._snapshot(arena, own, ask) if arena.layout.hex().startswith(ask.layout) and ranges else None
            if given is not None and ranges is not None:
                image, release = given
                return [image[start:end] for start, end in ranges], release
        return f"step {ask.step} of rank {ask.rank} is not here"

    def _arenas(self, rank: int) -> Iterator[tuple[Arena, bool]]:
        with self._lock:
            if rank in self._own:
                yield self._own[rank][1], True
            if rank in self._backups:
                yield self._backups[rank].arena, False

    def _snapshot(self, arena: Arena, own: bool, ask: Ask) -> tuple[memoryview, Callable[[], None]] | None:
        for one in arena.sealed():
            if one.step != ask.step or not arena.pin(one.slot, one.seq):
                continue
            key = (ask.rank, own, one.seq)
            wrong = "" if key in self._sound else arena.verify(one.slot)
            if not wrong:
                self._sound.add(key)
                return arena.image(one.slot), partial(arena.unpin, one.slot)
            arena.unpin(one.slot)
            arena.drop(one.slot)
            self.say(f"the copy of rank {ask.rank} is damaged ({wrong}); an older one is used")
        return None

    def _compact(self, ask: Ask) -> tuple[tuple[int, int], ...] | None:
        """Ranges of a whole image as they lie in a copy, which has the rank's share only."""
        plan = self._plan(ask.rank, ask.layout)
        found, before = [], 0
        for part in plan.share() if plan else ():
            shift = before - part.start
            found += [(a, b, shift) for a, b in ask.ranges if part.start <= a and b <= part.end]
            before += part.end - part.start
        if len(found) != len(ask.ranges):
            return None
        shifts = {(a, b): shift for a, b, shift in found}
        return tuple((a + shifts[a, b], b + shifts[a, b]) for a, b in ask.ranges)

    def _plan(self, rank: int, layout: str) -> Layout | None:
        if (rank, layout) not in self._plans:
            try:
                content = (self._notes / plan_name(rank, layout)).read_bytes()
                self._plans[rank, layout] = msgspec.msgpack.decode(content, type=Layout)
            except (OSError, msgspec.DecodeError):
                return None
        return self._plans[rank, layout]


async def _awaited(making: Awaitable[str]) -> str:
    return await making


def _nothing() -> None:
    pass
