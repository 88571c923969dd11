"""Writes the snapshots of a job's last step before the node leaves, within a time limit, to storage or else to disk."""

import asyncio
import sys
from collections.abc import Sequence

import msgspec

from holdfast.agent.snapshots.arena_table import ArenaTable, SnapshotPin, pin_snapshot
from holdfast.agent.snapshots.checkpoint_writer import CheckpointWriter, PartWrite
from holdfast.agent.snapshots.keeper_interfaces import KeeperPorts, StateDisk
from holdfast.checkpoint.arena import STORED
from holdfast.checkpoint.write_lane import WriteOutcome
from holdfast.model.node_errands import FinalState, Leave

_LOOK_S = 0.02
_TELL_S = 5.0  # between two sentences on how far a write is
_PUBLISHED_S = 0.2
_STORAGE = 0.5  # of the time storage has alone; from then on the disk gets the final state as well
_OLDER = 0.5  # of the time an older write that is under way may have: it may be what there is in the end


class FinalWriter:
    """Writes the final states of this node's ranks. All nodes write the same step; each keeper reports its failures."""

    def __init__(self, arenas: ArenaTable, persisting: CheckpointWriter, disk: StateDisk, ports: KeeperPorts) -> None:
        self._arenas = arenas
        self._persisting = persisting
        self._disk = disk
        self._clock = ports.clock
        self._say = ports.say
        self._not_after = sys.maxsize  # later steps are in doubt, wherever they are
        self._answered = True  # storage has told what is published there

    async def leave_job(self, errand: Leave, ranks: Sequence[int]) -> None:
        """Write the final states to storage. If the job has ended and storage is slow or rank 0 does not publish, also
        write them to this node's disk, within the same time limit. Remove states from the disk that storage has. Keep a
        state that no storage has, because it is the only copy."""
        until = self._clock.monotonic() + errand.last_s
        self._not_after = min((doubt.not_after for doubt in errand.doubts), default=sys.maxsize)
        good = next((last for last in errand.last if not last.doubted), None)
        if good:  # so storage had none as new: what is remembered as later is of a line that was left
            errand = msgspec.structs.replace(errand, stored=min(errand.stored, good.step - 1))
        storing = asyncio.create_task(self._store_last(errand, ranks, until))
        if not self._disk.limits.path or not errand.ended:
            await storing
            if errand.disk_over:
                await asyncio.to_thread(self._disk.remove_run)
            return
        done, _ = await asyncio.wait([storing], timeout=errand.last_s * _STORAGE)
        if good and not (done and storing.result() >= good.step):
            await self._disk.write_final(good.step, good.ranks, until - self._clock.monotonic())
        stored = await storing
        if good and good.step > max(stored, self._disk.final):
            self._say(f"neither storage nor the disk at {self._disk.limits.path} has step {good.step}")
        answered = self._answered and not self._persisting.is_held_up
        await self._disk.leave_job(ranks, stored, errand.spared, self._not_after, answered=answered)

    async def _store_last(self, errand: Leave, ranks: Sequence[int], until: float) -> int:
        """Write the final states to storage; return the newest step that is published there and not in doubt."""
        await self.write_last(errand.last, errand.last_s)
        if 0 in ranks and errand.ended:
            await self._persisting.mark_doubts(errand.doubts)
            await self._persisting.clean_up()
        if not ranks or not all(map(self._persisting.storage_url, ranks)):
            return errand.stored
        return await self._await_published(ranks, errand.stored, until)

    async def write_last(self, lasts: tuple[FinalState, ...], within_s: float) -> None:
        """Write the final states one step after another, in this order, until time is up."""
        until = self._clock.monotonic() + within_s
        for last in lasts:
            async with asyncio.TaskGroup() as tasks:
                for rank in last.ranks:
                    tasks.create_task(self._write_rank(rank, last, until, f"{within_s:.0f} s"))

    async def _write_rank(self, rank: int, last: FinalState, until: float, within: str) -> None:
        pinned = self._pin_unwritten(rank, last)
        if pinned is None:
            return
        left_s = until - self._clock.monotonic()
        job = self._persisting.last_write(rank, pinned, left_s, doubted=last.doubted)
        if job is None:
            pinned.release()
            return
        await self._await_writes(rank, last, left_s)
        if not last.doubted and self.stored_step(rank) >= last.step:
            pinned.release()
            return
        named = f"step {last.step}{' (in doubt)' if last.doubted else ''}"
        if rank == 0:
            self._say(f"writing {named} to {job.url} before the job ends, for {within} at most")
        writing = asyncio.create_task(self._persisting.run_write(job))
        if not await self._await_write(writing, job, named, until):
            self._persisting.give_up(rank)
            why = f"{named} was not written to {job.url} within {within}"
            if rank == 0:
                self._say(why)
        else:
            why = "" if writing.result().ok else writing.result().detail
            self._report_outcome(rank, named, writing.result(), doubted=last.doubted)
        if why and not last.doubted:
            self._persisting.note_missed(rank, last.step, why)

    async def _await_write(self, writing: asyncio.Task[WriteOutcome], job: PartWrite, named: str, until: float) -> bool:
        """Wait until the write is over, and tell now and then how far rank 0's is. Return False if time is up first."""
        began_at = self._clock.monotonic()
        while (left_s := until - self._clock.monotonic()) > 0:
            done, _ = await asyncio.wait([writing], timeout=min(_TELL_S, left_s))
            if done:
                return True
            if job.want.rank == 0 and left_s > _TELL_S:
                took_s = self._clock.monotonic() - began_at
                self._say(f"writing {named} to {job.url}: {job.describe_progress()} after {took_s:.0f} s")
        return writing.done()

    def _pin_unwritten(self, rank: int, last: FinalState) -> SnapshotPin | None:
        """Pin the rank's snapshot of the final step; return None if it is not here or is already on storage."""
        own = self._arenas.find_arena(rank)
        if own is None or (not last.doubted and self.stored_step(rank) >= last.step):
            return None
        found = next((one for one in own.arena.list_sealed() if one.step == last.step), None)
        return None if found is None or found.flags & STORED else pin_snapshot(own.arena, found)

    def stored_step(self, rank: int) -> int:
        """Return the newest step, not in doubt, of which storage has this rank's state; -1 if there is none."""
        written = self._persisting.stored if rank == 0 else self._persisting.done.get(rank, -1)
        return max(written if written <= self._not_after else -1, self._read_step(rank))

    def _read_step(self, rank: int) -> int:
        own = self._arenas.find_arena(rank)
        sealed = own.arena.list_sealed() if own else ()
        return max((one.step for one in sealed if one.flags & STORED and one.step <= self._not_after), default=-1)

    async def _await_published(self, ranks: Sequence[int], stored: int, until: float) -> int:
        """Wait until rank 0's node has published the newest step of these ranks; return this step. If time runs out,
        return the newest step that is known to be published."""
        parts, read = min(map(self.stored_step, ranks)), min(map(self._read_step, ranks))
        forsaken = False
        while parts > max(stored, read) and 0 not in ranks:
            published = await asyncio.to_thread(self._persisting.is_published, ranks[0], parts)
            self._answered = published is not None
            if published:
                break
            if forsaken or self._clock.monotonic() > until:
                return max(stored, read)
            forsaken = await asyncio.to_thread(self._persisting.is_forsaken, ranks[0], parts)  # or published since
            await asyncio.sleep(_PUBLISHED_S)
        return max(parts, stored)

    async def _await_writes(self, rank: int, last: FinalState, left_s: float) -> None:
        """Wait for the rank's writes. Give up all of them if they are slow, or if one is later than the final step."""
        until = self._clock.monotonic() + left_s * _OLDER
        while steps := [step for writer, step in self._persisting.under_way if writer == rank]:
            if max(steps) > last.step or self._clock.monotonic() > until:
                self._persisting.give_up(rank)
            await asyncio.sleep(_LOOK_S)
            if self._clock.monotonic() > until + left_s * (1 - _OLDER):
                return

    def _report_outcome(self, rank: int, named: str, outcome: WriteOutcome, *, doubted: bool) -> None:
        if not outcome.ok:
            self._say(f"rank {rank}: {outcome.detail}")
        elif rank == 0 and doubted:
            self._say(f"{named} was written to {outcome.url}, where no restore looks for it")
        elif rank == 0:
            self._say(f"{named} was written to {outcome.url} in {outcome.took_s:.1f} s")
