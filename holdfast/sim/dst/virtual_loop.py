"""An event loop in virtual time: nothing sleeps, and the clock jumps to the next event."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from random import Random
from typing import Any, TypeVarTuple

START_AT = 1000.0
_RESOLUTION_S = 1e-9
_ROUNDS = 10_000
_THREAD_S = 0.2  # what a thread does takes so long at most

Ts = TypeVarTuple("Ts")


class StuckError(Exception):
    """The simulation cannot go on: all tasks wait forever, or events repeat without time passing."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs real coroutines in virtual time; events of one instant run in the order in which they were planned."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = Random(f"threads {seed}")
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

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], Any], *args: *Ts) -> asyncio.Future[Any]:
        """Run a function as a thread would: after a random delay, and not at all if its result is no longer wanted."""
        done: asyncio.Future[Any] = self.create_future()

        def run() -> None:
            if done.done():
                return
            try:
                done.set_result(func(*args))
            except BaseException as e:
                done.set_exception(e)

        self.call_later(self._rng.uniform(0.0, _THREAD_S), run)
        return done

    def _process_events(self, events: list[object]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def describe_error(error: BaseException) -> str:
    """Return the error's type and message, or the types and messages of all errors in an exception group."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe_error(e) for e in error.exceptions)
    return f"{type(error).__name__}: {error}"
