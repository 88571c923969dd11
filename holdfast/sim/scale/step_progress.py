"""Steps of a job at scale: the newest step, and the step that a restart resumes from."""

from math import ceil
from random import Random

from holdfast.core.snapshots.recovery_floor_coordination import BackupLimits
from holdfast.model.action import Launch
from holdfast.model.decider_events import Progress
from holdfast.sim.scale.failure_schedule import ScaleSetup
from holdfast.sim.scale.price_sheet import PriceDraws
from holdfast.sim.scale.scale_result import ScaleTally

_DUTY = BackupLimits().duty  # the part of the time that copies to peers are on their way
_PUBLISHED_S = 120.0  # a checkpoint is complete on storage so long after its step


class ScaleProgress:
    survives = False  # ranks go on in their processes when a node is lost
    resizes = False  # and among more or fewer nodes

    def __init__(self, setup: ScaleSetup, prices: PriceDraws, rng: Random, tally: ScaleTally) -> None:
        self._setup = setup
        self._prices = prices
        self._rng = rng
        self._tally = tally
        self.behind = 0  # steps that this generation has to make again
        self._best = 0  # furthest step of the line that counts
        self._first = 1
        self._first_at: float | None = None
        self._stalled_at: float | None = 0.0
        self._tier = "stored_state"
        self._again = False  # queued again: nothing is left in memory
        self._drags: list[tuple[float, float, float]] = []  # of this generation: from, until, the part that is lost

    @property
    def stalled(self) -> bool:
        return self._stalled_at is not None

    def current_step(self, now: float) -> int:
        if self._first_at is None:
            return self._best
        return self._first + int(self._stepped_s(self.good_at(now)) / self._setup.step_s)

    def _stepped_s(self, until: float) -> float:
        """Return for how long this generation had made steps by `until`, without the time lost to slow steps."""
        lost = sum(part * max(0.0, min(end, until) - start) for start, end, part in self._drags)
        return until - (self._first_at or 0.0) - lost

    def slow_steps(self, start: float, end: float, part: float) -> None:
        """Record that steps were slow from `start` to `end`: `part` of that time is lost."""
        self._drags.append((start, end, part))

    def take_slow_steps(self, now: float) -> list[tuple[float, float, float]]:
        """Return the slow stretches of the generation that has ended, and forget them."""
        until = self.good_at(now)
        found = [(start, min(end, until), part) for start, end, part in self._drags if start < until]
        self._drags = []
        return found

    @property
    def newest(self) -> int:
        """Return the newest step that was made."""
        return self._best

    def good_at(self, now: float) -> float:
        """Return the time until which training made steps: now, or the instant at which it stalled."""
        return now if self._stalled_at is None else min(now, self._stalled_at)

    def runs_s(self, now: float) -> float:
        """Return for how long this generation has made steps, in seconds."""
        return self.good_at(now) - self._first_at if self._first_at is not None else 0.0

    def saving_share(self) -> float:
        """Return the share of time lost to saving: snapshots, and the slowdown while copies are sent."""
        if "snapshots" in self._setup.off:
            return 0.0
        copies = 0.0 if "backups" in self._setup.off else self._prices.share_value("backup_drag") * _DUTY
        return self._prices.share_value("save_stall_s") / self._setup.step_s + copies

    def stall_steps(self, now: float) -> None:
        if self._stalled_at is None:
            self._stalled_at = now
            self._best = self.current_step(now)

    def progress_event(self, now: float, generation: int) -> Progress | None:
        """Return the progress event for the decider; None before the first step of a generation."""
        if self._first_at is None:
            return None
        step = self.current_step(now)
        return Progress(
            generation=generation,
            step=step,
            at=self._step_at(step, now),
            first_step=self._first,
            first_at=self._first_at,
            counted=False,
            backed="backups" not in self._setup.off,
            survives=self.survives,
            resizes=self.resizes,
        )

    def _step_at(self, step: int, now: float) -> float:
        """Return when this generation made its newest step, which is `step`."""
        if self._drags:
            good_at = self.good_at(now)
            return good_at - self._stepped_s(good_at) % self._setup.step_s
        return (self._first_at or 0.0) + (step - self._first) * self._setup.step_s

    def on_end(self, now: float) -> None:
        self.stall_steps(now)
        self._again = True

    def choose_restore(self, action: Launch, dead: tuple[int, ...], *, changed: bool) -> None:
        """Choose where state comes from (ranks' own memory, else a peer's memory, else storage), and the step to resume
        from."""
        seats = len(action.seats)
        step_s, off = self._setup.step_s, self._setup.off
        stored_every = self._prices.share_value("stored_every_s")
        stored = int(max(0.0, self._best * step_s - _PUBLISHED_S) // stored_every * stored_every / step_s)
        paired = {(number + seats // 2) % seats for number in dead}  # as core/snapshots/peer_placement.py places copies
        if self._again or "snapshots" in off or (dead and ("backups" in off or paired.intersection(dead))):
            self._tier, resumed = "stored_state", stored
        elif dead:
            self._tier, resumed = "peer_state", max(0, self._best - ceil(self._late_s() / step_s))
        else:
            tier = "peer_state" if changed else "own_state"  # an admitted node has to fetch what it needs
            self._tier, resumed = tier, max(0, self._best - self._rng.randint(0, 1))
        if action.not_after is not None:
            resumed = min(resumed, max(0, action.not_after))
        self._again = False
        self.behind = self._best - resumed
        self._first, self._first_at = resumed + 1, None
        self._tally.restored[self._tier] = self._tally.restored.get(self._tier, 0) + 1

    def keep_live(self) -> None:
        """Resume from the state in living nodes: only the step under way is made again."""
        self._tier, self._again, self.behind = "live_state", False, 0
        self._first, self._first_at = self._best + 1, None
        self._tally.restored[self._tier] = self._tally.restored.get(self._tier, 0) + 1

    def _late_s(self) -> float:
        """Draw for how many seconds a step is not yet on a peer: sending takes time, and a pause may come first."""
        sent_s = self._prices("peer_state")
        return sent_s + self._rng.uniform(0.0, sent_s / _DUTY + self._setup.step_s)

    def restore_s(self) -> float:
        return 0.0 if self._tier == "live_state" else self._prices(self._tier)

    def begin_steps(self, now: float) -> None:
        self._first_at, self._stalled_at = now, None
