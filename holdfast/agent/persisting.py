"""Snapshots become checkpoints: each rank's share is written from memory, and rank 0's keeper publishes the whole."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.checkpoint import owner, persist, retention
from holdfast.checkpoint.arena import DUE, Arena, Sealed
from holdfast.checkpoint.lane import Lane, Outcome, Pulse
from holdfast.checkpoint.manifest import Author, StorageError
from holdfast.model.copy import Doubt
from holdfast.wire.keeping import Want

_PARTS_S = 60.0  # for the slowest rank's part; one that missed the step has none
_STALL_S = 15.0  # storage that takes nothing for so long is given up for this step, and the snapshot is free again
_MISSED = 4  # steps that are remembered as missing: rank 0 waits for one at a time
_log = logging.getLogger("holdfast.keeper")


class Persisting:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._author = Author(0)
        self._doubts: tuple[Doubt, ...] = ()
        self._say = say
        self._wants: dict[int, Want] = {}
        self._lanes: dict[tuple[int, str], Lane] = {}  # one each: a rank whose storage hangs holds up no other
        self._written: dict[int, int] = {}  # rank -> newest step that was taken on
        self._missed: dict[int, set[int]] = {}  # rank -> steps whose part is not written, and rank 0 may wait for it
        self.stored = -1  # newest step that was published
        self._trouble: set[str] = set()  # storages

    def begin(self, author: Author, doubts: tuple[Doubt, ...] = ()) -> None:
        self._author, self._doubts = author, doubts
        for lane in self._lanes.values():
            lane.give_up()  # of a generation that is over: a part that is missing will not come
        self._wants.clear()
        self._written.clear()
        self._missed.clear()
        self.stored = -1

    def want(self, want: Want) -> None:
        self._wants[want.rank] = want

    def recalled(self) -> None:
        """These wants are from an agent before this one, which may have been killed while it wrote."""
        self._missed.update({rank: {persist.UNKNOWN} for rank in self._wants})

    def due(self, rank: int, sealed: Sealed) -> bool:
        """By the step's number, or because all ranks have agreed on it and marked it: all write the same steps."""
        want = self._wants.get(rank)
        if want is None or want.storage is None or sealed.step <= self._written.get(rank, -1):
            return False
        every = want.storage.every_steps
        return sealed.step % every == 0 if every > 0 else bool(sealed.flags & DUE)

    async def write(self, rank: int, arena: Arena, sealed: Sealed) -> None:
        want, author = self._wants[rank], self._author
        assert want.storage is not None
        self._written[rank] = sealed.step
        before = frozenset(sorted(self._missed.get(rank, ()))[-_MISSED:])
        missed = self._missed[rank] = {*before, sealed.step}  # until it is written
        if not arena.pin(sealed.slot, sealed.seq):
            self._say(f"step {sealed.step} of rank {rank} was overwritten before it could be written to storage")
            return
        pinned = Pinned(arena, sealed.slot)
        url = want.storage.url
        lane = self._lanes.setdefault((rank, url), Lane(url, self._say, _STALL_S))
        job = Job(want, author, pinned, sealed)
        job.doubts, job.missed = self._doubts, before
        try:
            outcome = await asyncio.to_thread(lane.run, sealed.step, job.carry)
        finally:
            pinned.release()
        if author != self._author:  # of a generation that is over: no trouble of the storage
            _log.info("rank %d: %s", rank, outcome.detail)
            return
        missed -= job.told
        if outcome.ok and rank == 0:
            self.stored = max(self.stored, sealed.step)
        self._report(rank, url, outcome)

    def _report(self, rank: int, url: str, outcome: Outcome) -> None:
        """Trouble with a storage is told when it begins and when it ends, not once for every rank and step."""
        _log.info("rank %d: %s", rank, outcome.detail)
        if not outcome.ok and url not in self._trouble:
            self._trouble.add(url)
            self._say(f"rank {rank}: {outcome.detail}; training goes on, snapshots stay in memory")
        elif outcome.ok and outcome.url and url in self._trouble:
            self._trouble.discard(url)
            self._say(f"checkpoints are written again: {outcome.detail}")


class Pinned:
    """A snapshot that its rank must leave alone, until somebody says otherwise, once."""

    def __init__(self, arena: Arena, slot: int) -> None:
        self.arena = arena
        self.slot = slot
        self._held = True
        self._lock = threading.Lock()

    def release(self) -> None:
        with self._lock:
            held, self._held = self._held, False
        if held:
            self.arena.unpin(self.slot)


class Job:
    """One rank's part of one checkpoint."""

    def __init__(self, want: Want, author: Author, pinned: Pinned, sealed: Sealed) -> None:
        self._want = want
        self._author = author
        self._pinned = pinned
        self._step = sealed.step
        self.doubts: tuple[Doubt, ...] = ()
        self.missed: frozenset[int] = frozenset()  # steps before this one whose part will not come
        self.told: set[int] = set()  # of these, and of this one if it is written: nobody waits for them

    def carry(self, pulse: Pulse) -> str:
        """Write the part; rank 0 then waits for the others' and publishes. The answer is the checkpoint's URL."""
        want = self._want
        assert want.storage is not None
        base = want.storage.url
        if want.rank == 0:
            owner.take(base, self._author)  # from here on no older generation can publish
        folder = persist.staging(base, self._step, self._author)
        if want.rank != 0 and self.missed:
            self.told |= self.missed
            with suppress(StorageError):
                persist.forsake(base, self._author, want.rank, self.missed, before=self._step)
        if want.rank != 0 and not persist.begun(folder, pulse):
            return ""
        image = self._pinned.arena.image(self._pinned.slot)
        ranges = [image[start:end] for start, end in want.share]
        persist.write_part(folder, want.rank, ranges, pulse=pulse)
        self.told.add(self._step)
        self._pinned.release()
        if want.rank != 0:
            return ""
        parts = persist.collect(folder, want.world, _PARTS_S, pulse)
        try:
            metadata = Path(want.metadata_path).read_bytes()
        except OSError as e:
            raise StorageError(f"the checkpoint's metadata is gone: {e}") from None
        url = persist.publish(base, self._step, parts, metadata, author=self._author, layout=want.layout, pulse=pulse)
        try:
            found = retention.find(base) if self.doubts else ()
            doubted = [one.step for one in retention.doubted(found, self._author.run, self.doubts) if not one.ok]
            retention.retain(base, want.storage.keep, want.storage.keep_every, newest=self._step, doubted=doubted)
            retention.clean(base, self._author)
        except StorageError as e:
            pulse.notes.append(f"old checkpoints could not be removed: {e}")
        return url
