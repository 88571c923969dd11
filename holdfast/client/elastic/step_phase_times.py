"""Measures the time of each phase of a pipeline's steps and recoveries."""

import time
from collections.abc import Callable

_WEIGHT = 0.25  # of a new step in the running mean


class StepPhases:
    """Measures phases; when a phase begins, the one before it ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._name, self._since = "", 0.0
        self.took_s: dict[str, float] = {}  # by phase, since the last `begin`
        self.step_s = 0.0  # of a step, as a running mean

    def begin(self) -> None:
        self.took_s, self._name = {}, ""

    def enter(self, name: str) -> None:
        now = self._clock()
        if self._name:
            self.took_s[self._name] = self.took_s.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now

    def end_step(self) -> None:
        self.enter("")
        took_s = sum(self.took_s.values())
        self.step_s = took_s if not self.step_s else self.step_s + _WEIGHT * (took_s - self.step_s)
