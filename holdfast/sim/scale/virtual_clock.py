"""Virtual time: runs planned calls in order, and drops those of a job that has ended."""

from collections.abc import Callable
from heapq import heappop, heappush

ALWAYS = 0  # the life of what happens whatever becomes of the job


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0
        self.life = 1
        self._queue: list[tuple[float, int, int, Callable[..., object], tuple[object, ...]]] = []
        self._pushed = 0

    def call_later(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        """Plan a call. The call is dropped if the job ends before that time."""
        self.call_at(self.life, self.now + delay_s, call, *args)

    def call_at(self, life: int, at: float, call: Callable[..., object], *args: object) -> None:
        self._pushed += 1  # of two things at the same instant the one planned first comes first
        heappush(self._queue, (at, self._pushed, life, call, args))

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, life, call, args = heappop(self._queue)
            if life in (ALWAYS, self.life):
                call(*args)
        self.now = until
