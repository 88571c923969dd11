"""Spare ranks: processes that run the script up to the function that survives, and wait there for a seat.

When a rank that can survive dies, a spare rank is forked at once, before the incident is judged, so that it is ready
when the launch comes. It writes to a slot of its own, because others still have to read the dead rank's slot.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable

from holdfast.wire.holder_messages import RankKey
from holdfast.wire.progress_environment import FLIGHT, REHEARSAL, SEATLESS, SLOT
from holdfast.wire.rank_memory.flight_log_writer import flight_log_offset, slot_memory_bytes

SPARE = 0  # in place of a generation, in the key of a spare rank
_UNSEATED_S = 60.0  # after so long without a launch it is ended


def spare_key(rank: int) -> RankKey:
    return RankKey(SPARE, rank)


class SpareRanks:
    def __init__(self, nproc: int, end: Callable[[RankKey], None]) -> None:
        self._nproc, self._end = nproc, end
        self._memory = -1
        self._starts: dict[int, asyncio.Task[str]] = {}  # by rank; the result is an error in words

    def __contains__(self, rank: int) -> bool:
        return rank in self._starts

    def environment(self, local: int) -> dict[str, str]:
        """Return the variables that give a spare rank its own slot and flight log and tell it to wait for a seat."""
        if self._memory < 0:
            self._memory = os.memfd_create("holdfast-spare-slots")
            os.ftruncate(self._memory, slot_memory_bytes(self._nproc))
        path = f"/proc/{os.getpid()}/fd/{self._memory}"
        at = flight_log_offset(self._nproc, local)
        return {SLOT: f"{path}:{local}", FLIGHT: f"{path}:{at}", REHEARSAL: SEATLESS}

    def start(self, rank: int, starting: Awaitable[str]) -> None:
        self._starts[rank] = asyncio.ensure_future(starting)
        asyncio.get_running_loop().call_later(_UNSEATED_S, self.drop, rank, self._starts[rank])

    async def take(self, rank: int) -> bool:
        """Take the spare rank for this seat out of the spares; return False if there is none or its start failed."""
        start = self._starts.pop(rank, None)
        return start is not None and not await start

    def drop(self, rank: int, start: "asyncio.Task[str] | None" = None) -> None:
        """End the spare rank for this seat; with `start`, only if it came from that start."""
        if rank in self._starts and start in (None, self._starts[rank]):
            del self._starts[rank]
            self._end(spare_key(rank))

    def drop_all(self) -> None:
        for rank in list(self._starts):
            self.drop(rank)

    def on_end(self, rank: int) -> None:
        self._starts.pop(rank, None)
