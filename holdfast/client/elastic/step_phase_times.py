"""Measures the time of each phase of a pipeline's steps and recoveries."""

import time
from collections.abc import Callable

PASSES = "passes"  # the phase of a step in which this worker computes its layers
_WEIGHT = 0.25  # of a new step in the running mean


class StepPhases:
    """Measures phases; when a phase begins, the one before it ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._name, self._since = "", 0.0
        self.took_s: dict[str, float] = {}  # by phase, since the last `begin`
        self.step_s = 0.0  # of a step, as a running mean
        self.rest_s = 0.0  # of that, all but the passes

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
        rest_s = took_s - self.took_s.get(PASSES, 0.0)
        weight = _WEIGHT if self.step_s else 1.0
        self.step_s += weight * (took_s - self.step_s)
        self.rest_s += weight * (rest_s - self.rest_s)
