"""Tells the console what a job waits for that has too few nodes, as no decision says so again."""

import asyncio
from collections.abc import Callable

from holdfast.core.decide.job_view import JobView
from holdfast.linux.local_time import clock_text

_FIRST_S = 20.0  # nodes take some seconds to come
_CHANGED_S, _AGAIN_S = 30.0, 600.0  # before the next sentence, if it says something new, or the same
_LOOK_S = 1.0


class WaitTeller:
    def __init__(self, view: JobView, clock: Callable[[], float], say: Callable[[str], None]) -> None:
        self._view, self._clock, self._say = view, clock, say
        self._told_at, self._facts = 0.0, tuple[str, ...]()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.tell_wait(self._clock())

    def tell_wait(self, now: float) -> None:
        """Say what the job waits for, if it is time for that."""
        wait = self._view.node_wait(now)
        if wait is None or now < wait.since + _FIRST_S:
            self._facts = ()
            return
        pause_s = 0.0 if not self._facts else _AGAIN_S if wait.facts == self._facts else _CHANGED_S
        if now >= self._told_at + pause_s:
            self._told_at, self._facts = now, wait.facts
            self._say(wait.describe(now, clock_text))
