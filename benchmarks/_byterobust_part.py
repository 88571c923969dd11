"""One part of ByteRobust's evaluation as we repeat it: rows of a table, ours beside the published, and figures."""

import os
import statistics
from collections.abc import Sequence

import msgspec

from benchmarks._report import Figure, commit

Row = tuple[str, str, str, str]  # what, ours, published, what differs


class Part(msgspec.Struct):
    rows: list[Row] = []
    figures: dict[str, Figure] = {}
    goals: dict[str, bool] = {}
    skipped: dict[str, str] = {}
    runs: dict[str, list[float | None]] = {}
    load: float = 0.0
    commit: str = ""

    def stamped(self) -> "Part":
        """Parts are measured one by one, so each says at which load and of which commit."""
        self.load, self.commit = round(os.getloadavg()[0], 1), commit()
        return self


def spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "never"
    return f"{statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})"
