"""Finds ranks that have latched a failure but whose process does not end."""

from collections.abc import Iterator, Mapping

import msgspec

from holdfast.wire.holder_messages import HolderRank, RankKey
from holdfast.wire.rank_memory.slot_reader import SlotReading

_LATCH_S = 1.0  # one that has not ended by then is reported all the same


class LatchedFailures:
    def __init__(self) -> None:
        self._since: dict[RankKey, float] = {}

    def overdue_ranks(
        self, now: float, held: Mapping[RankKey, HolderRank], readings: Mapping[RankKey, SlotReading]
    ) -> Iterator[HolderRank]:
        """Yield each rank, once, that has latched a failure and not ended in time; it is shown as ended with code 1."""
        for key in [key for key, reading in readings.items() if reading.failed and key in held]:
            since = self._since.setdefault(key, now)
            if held[key].code is None and now >= since + _LATCH_S:
                self._since[key] = float("inf")
                yield msgspec.structs.replace(held[key], code=1, at=now)
