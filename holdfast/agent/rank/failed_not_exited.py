"""Finds ranks that have latched a failure but whose process does not end."""

from collections.abc import Iterator, Mapping

import msgspec

from holdfast.wire.holder_messages import HolderRank
from holdfast.wire.rank_memory.slot_reader import SlotReading

_LATCH_S = 1.0  # one that has not ended by then is reported all the same


class LatchedFailures:
    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def overdue_ranks(
        self, now: float, held: Mapping[str, HolderRank], readings: Mapping[str, SlotReading]
    ) -> Iterator[HolderRank]:
        """Yield once each rank that latched a failure a while ago and still runs, as if it ended now with code 1."""
        for rank in [held[key] for key, reading in readings.items() if reading.failed and key in held]:
            since = self._since.setdefault(rank.key, now)
            if rank.code is None and now >= since + _LATCH_S:
                self._since[rank.key] = float("inf")
                yield msgspec.structs.replace(rank, code=1, at=now)
