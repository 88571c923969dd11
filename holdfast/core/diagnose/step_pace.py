"""The pace of a job: how long a step takes or, where the script tells it, a token or a FLOP.

Steps may grow on purpose: longer sequences, larger batches. So where a script tells the tokens or FLOPs of its steps,
the time of this work is compared, FLOPs before tokens, and the length of a step says nothing about the pace.
"""

from collections import deque
from enum import StrEnum
from statistics import median

import msgspec

from holdfast.model.observation import Beat

STEPS = 32  # of whose times the median is the job's pace


class WorkUnit(StrEnum):
    """What is counted to compare a job's pace; each value is the unit's name in sentences."""

    STEPS = "steps"
    TOKENS = "tokens"
    FLOPS = "FLOPs"


class BestPace(msgspec.Struct, frozen=True):
    """The shortest time that one unit of work has taken."""

    unit: WorkUnit
    seconds: float


class StepPace:
    """Measures times of steps and of told work: the present ones, this generation's best to judge nodes, this release's
    best to judge the job."""

    def __init__(self, limit: float, lasting_s: float, former: BestPace | None = None) -> None:
        self._limit, self._lasting_s = limit, lasting_s
        self._former = former  # of earlier generations with this release; None: unknown
        self.unit = WorkUnit.STEPS
        self._steps: dict[str, tuple[int, float]] = {}  # node -> newest step and when
        self._work: dict[str, tuple[float, float]] = {}  # node -> work told so far, and when it was done
        self._took: deque[float] = deque(maxlen=STEPS)
        self._took_by_work: deque[float] = deque(maxlen=STEPS)
        self._best_s = 0.0
        self.slow_since: float | None = None  # more than the limit; None: it is not

    @property
    def step_s(self) -> float:
        return median(self._took) if self._took else 0.0

    @property
    def slowdown_ratio(self) -> float:
        """The present time of a unit divided by the best time; 1.0 while the best is unknown."""
        return self._unit_s / self._best_s if self._best_s else 1.0

    @property
    def release_best(self) -> BestPace | None:
        """The best time of a unit with this release so far; None while it is unknown."""
        own = BestPace(self.unit, self._best_s) if self._best_s else None
        if own is None or self._former is None or own.unit is not self._former.unit:
            return own or self._former
        return min(own, self._former, key=lambda best: best.seconds)

    def on_beat(self, now: float, beat: Beat) -> None:
        step, at = self._steps.get(beat.node, (beat.step, beat.at))
        if beat.step > step >= 0:
            self._took.append((beat.at - at) / (beat.step - step))
        if beat.step != step or beat.node not in self._steps:
            self._steps[beat.node] = (beat.step, beat.at)
            self._on_work(beat)
        times = self._times
        if len(times) == times.maxlen:
            self._best_s = min(self._best_s or self._unit_s, self._unit_s)

    @property
    def release_ratio(self) -> float:
        """The present time of a unit divided by the release's best; 1.0 while that cannot be told."""
        # Before the generation's own best is known it is in its first steps, which are slow in every generation.
        best = self.release_best if self._best_s else None
        return self._unit_s / best.seconds if best else 1.0

    def lasting_slowdown(self, now: float) -> float:
        """Return the time of a unit divided by the release's best if this was too high for long enough; else 0."""
        ratio = self.release_ratio
        if ratio < self._limit:
            self.slow_since = None
            return 0.0
        self.slow_since = now if self.slow_since is None else self.slow_since
        return ratio if now >= self.slow_since + self._lasting_s else 0.0

    @property
    def _times(self) -> deque[float]:
        return self._took if self.unit is WorkUnit.STEPS else self._took_by_work

    @property
    def _unit_s(self) -> float:
        return median(self._times) if self._times else 0.0

    def _on_work(self, beat: Beat) -> None:
        """Measure the time of the work that this beat tells. A script that tells it now and then tells it of several
        steps at once."""
        unit = WorkUnit.FLOPS if beat.flops else WorkUnit.TOKENS if beat.tokens else WorkUnit.STEPS
        if unit is WorkUnit.STEPS:
            return
        if unit is not self.unit and self.unit is not WorkUnit.FLOPS:
            self.unit = unit
            self._work.clear()
            self._took_by_work.clear()
            self._best_s, self.slow_since = 0.0, None
        done = beat.flops if self.unit is WorkUnit.FLOPS else beat.tokens
        before, at = self._work.get(beat.node, (done, beat.at))
        if done > before:
            self._took_by_work.append((beat.at - at) / (done - before))
        if done != before or beat.node not in self._work:
            self._work[beat.node] = (done, beat.at)
