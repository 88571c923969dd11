"""Limits how often a caller may ask: enough for people, tools and nodes, too little to keep the asked one busy."""

import time
from collections import OrderedDict
from collections.abc import Callable

_MOST_CALLERS = 1024


class RequestRates:
    """Limits the calls of each caller by a token bucket. Among too many callers, the longest idle one is forgotten."""

    def __init__(self, a_second: float, at_once: float, now: Callable[[], float] = time.monotonic) -> None:
        self._a_second, self._at_once, self._now = a_second, at_once, now
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by caller: how many, and when

    def may_call(self, caller: str) -> bool:
        now = self._now()
        left, at = self._left.pop(caller, (self._at_once, now))
        left = min(self._at_once, left + (now - at) * self._a_second)
        allowed = left >= 1
        self._left[caller] = (left - 1 if allowed else left, now)
        while len(self._left) > _MOST_CALLERS:
            self._left.popitem(last=False)
        return allowed
