"""An event loop whose time is virtual: nobody sleeps, the clock jumps to whatever is next."""

import asyncio

START_AT = 1000.0
_RESOLUTION_S = 1e-9
_ROUNDS = 10_000


class StuckError(Exception):
    """There is no going on from here."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs the very coroutines of the controller; of two things at one instant the one planned first comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.at = START_AT
        self._clock_resolution = _RESOLUTION_S
        self._selector = self
        self._rounds = 0  # without time

    def time(self) -> float:
        return self.at

    def select(self, timeout: float | None) -> list[object]:
        if timeout is None:
            raise StuckError("everybody waits, and nothing will ever happen")
        self._rounds = 0 if timeout else self._rounds + 1
        if self._rounds > _ROUNDS:
            raise StuckError("one thing leads to the next, and no time passes")
        self.at += timeout
        return []

    def _process_events(self, events: list[object]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
