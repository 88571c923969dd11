"""Writes the snapshots of the job's last step to storage before the node leaves, within a time limit."""

import asyncio

from holdfast.agent.snapshots.arena_table import ArenaTable, SnapshotPin, pin_snapshot
from holdfast.agent.snapshots.checkpoint_writer import CheckpointWriter
from holdfast.agent.snapshots.keeper_interfaces import KeeperPorts
from holdfast.checkpoint.arena import STORED
from holdfast.checkpoint.write_lane import WriteOutcome
from holdfast.model.errand import FinalState

_LOOK_S = 0.02
_OLDER = 0.5  # of the time an older write that is under way may have: it may be what there is in the end


class FinalWriter:
    """Writes the final states of this node's ranks. All nodes get the same step; rank 0's keeper reports."""

    def __init__(self, arenas: ArenaTable, persisting: CheckpointWriter, ports: KeeperPorts) -> None:
        self._arenas = arenas
        self._persisting = persisting
        self._clock = ports.clock
        self._say = ports.say

    async def write_last(self, lasts: tuple[FinalState, ...], within_s: float) -> None:
        """Write the final states in order, a good one before a doubted one, as far as time allows."""
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
        if not last.doubted and self.is_done(rank, last.step):
            pinned.release()
            return
        named = f"step {last.step}{' (in doubt)' if last.doubted else ''}"
        if rank == 0:
            self._say(f"writing {named} to {job.url} before the job ends, for {within} at most")
        writing = asyncio.create_task(self._persisting.run_write(job))
        done, _ = await asyncio.wait([writing], timeout=max(0.0, until - self._clock.monotonic()))
        if not done:
            self._persisting.give_up(rank)
            if rank == 0:
                self._say(f"{named} was not written to {job.url} within {within}")
            return
        self._report_outcome(rank, named, writing.result(), doubted=last.doubted)

    def _pin_unwritten(self, rank: int, last: FinalState) -> SnapshotPin | None:
        """Pin the rank's snapshot of the final step; return None if it is not here or is already on storage."""
        own = self._arenas.find_arena(rank)
        if own is None or (not last.doubted and self.is_done(rank, last.step)):
            return None
        found = next((one for one in own.arena.list_sealed() if one.step == last.step), None)
        return None if found is None or found.flags & STORED else pin_snapshot(own.arena, found)

    def is_done(self, rank: int, step: int) -> bool:
        """Return whether storage has the rank's state of this step or a later one."""
        return (self._persisting.stored if rank == 0 else self._persisting.done.get(rank, -1)) >= step

    async def _await_writes(self, rank: int, last: FinalState, left_s: float) -> None:
        """Wait for the rank's writes. Give them up if they are slow or of a later step, which not all ranks hold."""
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
