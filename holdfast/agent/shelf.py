"""What this node holds for others: copies of a peer's snapshots, and answers to whoever gathers a lost rank's state.

Links of other keepers are served in threads, which is why there is a lock.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import msgspec

from holdfast.agent.backup import NO_PLAN, PREFIX, Backup, Memory, Plans
from holdfast.agent.pairs import Pairs
from holdfast.checkpoint.arena import Arena, ArenaError, Sealed, Slot
from holdfast.checkpoint.serving import Holding
from holdfast.checkpoint.transport import Ask, cuts
from holdfast.wire.holding import KeptArena
from holdfast.wire.keeping import plan_name

Given = tuple[Sequence[memoryview], Callable[[], None]]


class Coming(msgspec.Struct):
    """A copy on its way in; a link that broke goes on where it was."""

    slot: Slot
    holding: Holding


class Shelf:
    def __init__(
        self, notes: Path, own: dict[int, tuple[str, Arena]], make: Callable[[str, int], Awaitable[str]]
    ) -> None:
        self.say: Callable[[str], None] = lambda text: None
        self._notes = notes
        self._own = own
        self._memory = Memory(make)
        self._plans = Plans(notes)
        self._backups: dict[int, Backup] = {}
        self._coming: dict[int, Coming] = {}
        self.pairs = Pairs(notes, self._plans, self._memory)
        self._generation = 0
        self._sound: set[tuple[Arena, int]] = set()  # and seq: found undamaged in this generation
        self._lock = threading.Lock()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._memory.start(loop)

    def recall(self, kept: KeptArena) -> None:
        arena = Arena.open(kept.path)
        name = kept.name.removeprefix(PREFIX)
        if name == str(arena.rank):
            self._backups[arena.rank] = Backup(arena)
        else:
            self.pairs.recall(name, arena)

    def launched(self, generation: int, step: int) -> None:
        """What came after the step that the job goes on from belongs to a line that is given up; -1: all of it."""
        with self._lock:
            self._generation = generation
            self._sound.clear()
            self._coming.clear()
            for backup in self._backups.values():
                backup.forget_after(step)
        self.pairs.launched(generation, step)

    def copies(self) -> Iterator[tuple[Arena, Sealed, bool]]:
        """Each with whether it is the rank's whole image."""
        with self._lock:
            for rank, backup in self._backups.items():
                plan = self._plans.get(rank, backup.arena.layout.hex())
                for one in backup.arena.sealed() if plan else ():
                    yield backup.arena, one, plan is not None and plan.image_bytes == backup.arena.image_bytes

    def hold(self, floor: int) -> list[str]:
        """This step is the job's floor now. Copies that lack it belong to nobody: their memory's names are answered."""
        left = self.pairs.hold(floor)
        with self._lock:
            for rank, backup in list(self._backups.items()):
                if not backup.hold(floor) and rank not in self._coming:
                    backup.release()
                    del self._backups[rank]
                    left.append(f"{PREFIX}{rank}")
        return left

    # --- a peer's copies come in -------------------------------------------------------------------------------

    def take(self, ask: Ask) -> Holding | str:
        if ask.verb == "tell":
            return self._plans.learn(ask)
        plan = self._plans.get(ask.rank, ask.layout)
        if plan is None:
            return NO_PLAN
        if ask.pair:
            return self.pairs.take(ask, plan)
        sizes = [part.end - part.start for part in plan.share()]
        if sum(sizes) != ask.bytes:
            return f"a copy has {sum(sizes)} bytes by its layout, not {ask.bytes}"
        try:
            found, layout = self._backups.get(ask.rank), bytes.fromhex(ask.layout)
            backup = self._memory.fit(found, str(ask.rank), layout, ask, ask.bytes)
        except (OSError, ArenaError, TimeoutError) as e:
            return f"no memory for a copy: {e}"
        with self._lock:
            if ask.generation != self._generation:
                return f"generation {ask.generation} is over; this node is in {self._generation}"
            self._backups[ask.rank] = backup
            return self._come(backup, ask, sizes)

    def _come(self, backup: Backup, ask: Ask, sizes: list[int]) -> Holding | str:
        if ask.floor >= 0:
            backup.hold(ask.floor)  # our own word of it may come later than the copy of the next
        coming = self._coming.get(ask.rank)
        if coming and (coming.slot.name.step, coming.slot.name.generation) == (ask.step, ask.generation):
            return coming.holding
        if any((one.step, one.generation) == (ask.step, ask.generation) for one in backup.arena.sealed()):
            return Holding([], sum(len(cuts(0, size)) for size in sizes), _nothing)  # the last answer was lost
        slot = backup.arena.begin(ask.step, ask.generation)
        if slot is None:
            return "all copies of this rank are in use"
        ends = list(accumulate(sizes))  # both sides cut it into chunks alike
        views = [slot.image[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        holding = Holding(views, 0, partial(self._arrived, backup.arena, slot))
        self._coming[ask.rank] = Coming(slot, holding)
        return holding

    def _arrived(self, arena: Arena, slot: Slot) -> None:
        with self._lock:
            coming = self._coming.get(arena.rank)
            if coming and coming.slot is slot:
                slot.seal()
                del self._coming[arena.rank]
        arena.check(slot.index)

    # --- others fetch ------------------------------------------------------------------------------------------

    def give(self, ask: Ask) -> Given | str:
        """A layout, or bytes of a snapshot: found undamaged before the first of them is sent."""
        if ask.verb == "plan":
            path = self._notes / plan_name(ask.rank, ask.layout)
            return ([memoryview(path.read_bytes())], _nothing) if path.exists() else NO_PLAN
        for arena, ranges in self._found(ask):
            given = self._snapshot(arena, ask) if ranges else None
            if given is not None:
                image, release = given
                return [image[start:end] for start, end in ranges], release
        return f"step {ask.step} of rank {ask.rank} is not here"

    def _found(self, ask: Ask) -> Iterator[tuple[Arena, tuple[tuple[int, int], ...]]]:
        """Where it could be, and where in there."""
        if ask.pair:
            yield from ((arena, ask.ranges) for arena in self.pairs.arena(ask))
            return
        with self._lock:
            own = self._own.get(ask.rank)
            backup = self._backups.get(ask.rank)
        if own and own[1].layout.hex().startswith(ask.layout):
            yield own[1], ask.ranges
        if backup and backup.arena.layout.hex().startswith(ask.layout):
            yield backup.arena, self._compact(ask)

    def _snapshot(self, arena: Arena, ask: Ask) -> tuple[memoryview, Callable[[], None]] | None:
        for one in arena.sealed():
            if one.step != ask.step or not arena.pin(one.slot, one.seq):
                continue
            wrong = "" if (arena, one.seq) in self._sound else arena.verify(one.slot)
            if not wrong:
                self._sound.add((arena, one.seq))
                return arena.image(one.slot), partial(arena.unpin, one.slot)
            arena.unpin(one.slot)
            arena.drop(one.slot)
            self.say(f"the copy of rank {ask.rank} is damaged ({wrong}); an older one is used")
        return None

    def _compact(self, ask: Ask) -> tuple[tuple[int, int], ...]:
        """Ranges of a whole image as they lie in a copy, which has the rank's share only; none if it has not all."""
        plan = self._plans.get(ask.rank, ask.layout)
        found, before = [], 0
        for part in plan.share() if plan else ():
            shift = before - part.start
            found += [(a, b, shift) for a, b in ask.ranges if part.start <= a and b <= part.end]
            before += part.end - part.start
        if len(found) != len(ask.ranges):
            return ()
        shifts = {(a, b): shift for a, b, shift in found}
        return tuple((a + shifts[a, b], b + shifts[a, b]) for a, b in ask.ranges)


def _nothing() -> None:
    pass
