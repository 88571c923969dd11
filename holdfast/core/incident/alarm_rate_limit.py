"""Rate limits for alarms: sums over a time window, a filter for repeats, and a cap on alarms per node."""

from collections import deque
from collections.abc import Hashable

import msgspec

from holdfast.model.detector_alarm import Alarm, Stance

_LOUDNESS = (Stance.OBSERVE, Stance.NOTIFY, Stance.ACT)
# Longer than the ladder's window, so that a machine which cannot be replaced does not stop its job again and again.
QUIET_S = 3600.0
_KEPT = 4096  # keys of a tally; the oldest goes first


def cap_stance(stance: Stance, cap: Stance) -> Stance:
    return min(stance, cap, key=_LOUDNESS.index)


class SlidingSum:
    """Sums per key over a sliding window. The number of keys is bounded, since text from outside may create keys."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, deque[tuple[float, float]]] = {}

    def add(self, now: float, key: Hashable, amount: float, within_s: float) -> float:
        """Add this amount to the key's entries and return the sum of those from the last `within_s` seconds."""
        entries = self._entries.setdefault(key, deque(maxlen=_KEPT))
        if len(self._entries) > _KEPT:
            del self._entries[next(iter(self._entries))]
        entries.append((now, amount))
        while entries[0][0] < now - within_s:
            entries.popleft()
        return sum(amount for _, amount in entries)

    def forget(self, key: Hashable) -> None:
        self._entries.pop(key, None)


class RepeatFilter:
    """Tells whether the same key was already reported within the quiet time."""

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        self.quiet_s = quiet_s
        self._said: dict[Hashable, float] = {}

    def is_repeat(self, now: float, key: Hashable) -> bool:
        """Return whether this key was reported within the quiet time. If it was not, record the key as reported now."""
        if now < self._said.get(key, float("-inf")) + self.quiet_s:
            return True
        self._said.pop(key, None)  # to the end, as the newest
        self._said[key] = now
        if len(self._said) > _KEPT:
            del self._said[next(iter(self._said))]
        return False

    def forget(self, key: Hashable) -> None:
        """Let this key be reported again at once."""
        self._said.pop(key, None)


class AlarmRateLimit:
    """Passes a limited number of alarms per window; the next alarm that passes states how many were dropped.

    Hard alarms have a window of their own, so that noise cannot hide them.
    """

    def __init__(self, most: int = 20, within_s: float = 60.0) -> None:
        self.most = most
        self.within_s = within_s
        self.dropped = 0
        self._passed: dict[bool, deque[float]] = {False: deque(), True: deque()}

    def admit_alarm(self, now: float, alarm: Alarm) -> Alarm | None:
        passed = self._passed[alarm.hard]
        while passed and passed[0] <= now - self.within_s:
            passed.popleft()
        if len(passed) >= self.most:
            self.dropped += 1
            return None
        passed.append(now)
        if not self.dropped:
            return alarm
        counted = f"{alarm.reason} ({self.dropped} other alarms were left out)"
        self.dropped = 0
        return msgspec.structs.replace(alarm, reason=counted)
