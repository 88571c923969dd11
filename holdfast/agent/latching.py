"""Ranks that told of their failure and do not end."""

from collections.abc import Iterator, Mapping

import msgspec

from holdfast.wire.holding import Held
from holdfast.wire.slot import Reading

_LATCH_S = 1.0  # one that has not ended by then is reported all the same


class Latches:
    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def overdue(self, now: float, held: Mapping[str, Held], readings: Mapping[str, Reading]) -> Iterator[Held]:
        """Each once, as if it had ended now."""
        for rank in [held[key] for key, reading in readings.items() if reading.failed and key in held]:
            since = self._since.setdefault(rank.key, now)
            if rank.code is None and now >= since + _LATCH_S:
                self._since[rank.key] = float("inf")
                yield msgspec.structs.replace(rank, code=1, at=now)
