"""Measures what slowness costs while a job trains on: by how many seconds a job as fast as before would be ahead."""

import msgspec

from holdfast.core.detect.slow import LostPace
from holdfast.model.decider_events import SlowTime

_NEWS_S = 10.0  # between two reports of one slowness; as of steps


class SlowTimeMeter:
    """Follows one slowness after the other. What a job loses while it stands still is not measured here."""

    def __init__(self) -> None:
        self._open: SlowTime | None = None
        self._told_at = 0.0

    def on_pace(self, now: float, generation: int, lost: LostPace | None) -> SlowTime | None:
        """Record how slow the job is now; None: it is as fast as ever, or stands. Return a report if one is due."""
        before, self._open = self._open, None
        if lost is None or (before and before.generation != generation):
            return before if before and before.until > self._told_at else None
        if before is None:
            node, cost_s = lost.named, lost.cost_s(now)
            self._open = SlowTime(generation=generation, since=lost.since, until=now, cost_s=cost_s, node=node)
        else:
            cost_s = before.cost_s + (now - before.until) * (1 - 1 / lost.ratio)
            self._open = msgspec.structs.replace(before, until=now, cost_s=cost_s, node=lost.named or before.node)
        if before and now < self._told_at + _NEWS_S:
            return None
        self._told_at = now
        return self._open
