"""The scene of one seed, which all parts of its world share: virtual clock, random numbers, log and first failure."""

import asyncio
import traceback
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from holdfast.sim.dst.seed_parameters import SeedSetup
from holdfast.sim.dst.virtual_loop import VirtualLoop, describe_error


class SeedScene:
    def __init__(self, setup: SeedSetup, say: Callable[[str], None] | None) -> None:
        self.setup = setup
        self.loop = VirtualLoop(setup.seed)
        self.rng = Random(setup.seed)
        self.over = False  # the job is
        self.failure = ""  # the first promise that was broken
        self._say = say
        self._closed = False
        self.loop.set_exception_handler(self._on_loop_error)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, what: dict[str, Any]) -> None:
        error = what.get("exception")
        where = traceback.extract_tb(error.__traceback__)[-1] if error else None
        self.report_failure(f"{what['message']}: {error!r} at {where}")

    def now(self) -> float:
        return self.loop.at

    def log_line(self, text: str) -> None:
        if self._say:
            self._say(f"{self.loop.at:9.3f} {text}")

    def call_later(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        self.loop.call_later(delay_s, call, *args)

    def run_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine of the simulated world; if it raises an error, the seed has failed."""
        self.loop.create_task(work).add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self.report_failure(f"the simulated world fails: {describe_error(error)}")

    def report_failure(self, what: str) -> None:
        if not self.failure and not self._closed:
            self.failure = f"at {self.loop.at:.3f}: {what}"
            self.log_line(f"BROKEN: {what}")
            if self.loop.is_running():
                self.loop.stop()

    def run(self, until: float) -> None:
        """Let virtual time pass until `until`, or until a check fails."""
        if not self.failure:
            end = self.loop.call_at(until, self.loop.stop)
            self.loop.run_forever()
            end.cancel()

    def end_checks(self) -> None:
        """Ignore failures from now on, because they would come from the end of the simulation itself."""
        self.over = self._closed = True

    def close(self) -> None:
        """End all tasks that still wait in the event loop, and close the loop."""
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        asyncio.set_event_loop(None)
        self.loop.close()
