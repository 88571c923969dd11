"""Spare ranks: processes that run the script up to the function that survives, and wait there for a seat.

When a rank that can survive dies, a spare rank is forked at once, before the incident is judged, so that it is ready
when the launch comes. It writes to a slot of its own, because the dead rank's slot still has to be read. If the
settings say so, every rank has a standing spare rank while the job trains. A standing spare rank has also rehearsed a
step.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable

from holdfast.wire.holder_messages import RankKey
from holdfast.wire.progress_environment import FLIGHT, REHEARSAL, SLOT, STANDING
from holdfast.wire.rank_memory.flight_log_writer import flight_log_offset, slot_memory_bytes

SPARE = 0  # in place of a generation, in the key of a spare rank
_UNSEATED_S = 60.0  # after so long without a launch it is ended


def spare_key(rank: int) -> RankKey:
    return RankKey(SPARE, rank)


class SpareRanks:
    def __init__(self, nproc: int, end: Callable[[RankKey], None], say: Callable[[str], None]) -> None:
        self._nproc, self._end, self._say = nproc, end, say
        self._memory = -1
        self._starts: dict[int, asyncio.Task[str]] = {}  # by rank; the result is an error in words
        self._standing: set[int] = set()
        self._failed: set[int] = set()  # ranks whose standing spare has ended by itself since the newest launch

    def __contains__(self, rank: int) -> bool:
        return rank in self._starts

    def next_standing(self, ranks: Iterable[int], is_ready: Callable[[RankKey], bool]) -> int | None:
        """Return a rank that still needs a standing spare; None if all have one, or while another spare is starting."""
        if not all(is_ready(spare_key(rank)) for rank in self._starts):
            return None
        return next((rank for rank in ranks if rank not in self._starts and rank not in self._failed), None)

    def environment(self, local: int, how: str) -> dict[str, str]:
        """Return the variables that give a spare rank its own slot and flight log. The spare waits for a seat as `how`
        says: SEATLESS or STANDING."""
        if self._memory < 0:
            self._memory = os.memfd_create("holdfast-spare-slots")
            os.ftruncate(self._memory, slot_memory_bytes(self._nproc))
        path = f"/proc/{os.getpid()}/fd/{self._memory}"
        at = flight_log_offset(self._nproc, local)
        return {SLOT: f"{path}:{local}", FLIGHT: f"{path}:{at}", REHEARSAL: how}

    def start(self, rank: int, starting: Awaitable[str], how: str) -> None:
        self._starts[rank] = asyncio.ensure_future(starting)
        if how == STANDING:
            self._standing.add(rank)
            return
        self._standing.discard(rank)
        asyncio.get_running_loop().call_later(_UNSEATED_S, self.drop, rank, self._starts[rank])

    async def take(self, rank: int) -> bool:
        """Take this rank's spare, which now gets the seat; return False if there is none or its start failed."""
        start = self._starts.pop(rank, None)
        return start is not None and not await start

    def drop(self, rank: int, start: "asyncio.Task[str] | None" = None) -> None:
        """End this rank's spare; with `start`, only if the spare comes from that start."""
        if rank in self._starts and start in (None, self._starts[rank]):
            del self._starts[rank]
            self._end(spare_key(rank))

    def drop_all(self) -> None:
        for rank in list(self._starts):
            self.drop(rank)

    def on_launched(self) -> None:
        """End the spare ranks that the launch has not used. Standing spare ranks stay."""
        self._failed.clear()
        for rank in self._starts.keys() - self._standing:
            self.drop(rank)

    def on_end(self, rank: int) -> None:
        """Note that a spare rank has ended. If it was a standing one, start no other for its rank until the launch."""
        if self._starts.pop(rank, None) is not None and rank in self._standing:
            self._failed.add(rank)
            self._say(f"the spare of rank {rank} has ended, and the rank has none until the next launch")
