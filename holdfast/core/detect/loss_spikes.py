"""Spike detector: finds a loss, gradient norm or update that stands out from this rank's recent values.

The detector judges a value only after it has seen enough values whose median is positive, because "five times" means
nothing otherwise. It judges an update only if it also saw the step before. It reports only the first norm that is not
finite. If norms are not finite from the start, it reports none, because loss scaling produces such norms on purpose.
The module `nonfinite_loss` handles losses that are not finite.

The rules cannot tell a fault from a bad batch. They cannot name the faulty rank, since all replicas share a summed
gradient. So they name the step. Only the norm of a rank's own gradient, before the sum, names a rank. The user chooses
the response (`loss.policy`). The job acts only on a loss or gradient norm that ranks share.
"""

from bisect import bisect_left, insort
from collections import deque
from enum import StrEnum
from math import isfinite, sqrt

import msgspec

from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.loss_response import Ease, LossPolicy, LossResponse
from holdfast.model.observation import StepValues

_LEAST = 16  # values before anything is judged
_NORMAL = 1.4826  # makes the median deviation of a normal spread its standard deviation
_FLAT = 1e-3  # of the median: no spread is taken for narrower
_ALPHA = 0.05  # of the update rule, and the steps from which it judges
_STEADY = 10
_JUMP = 5.0  # times the usual jump that one stands out from, however steep the rise of a gradient norm in the thousands


class SpikeRule(StrEnum):
    """The rules that find a spike. A rule's name says which value stands out and by which test."""

    LOSS_TIMES = "loss times"
    LOSS_SCORE = "loss score"
    NORM_TIMES = "norm times"
    NORM_SCORE = "norm score"
    OWN_TIMES = "own times"  # a rank's own gradient norm, before the sum over replicas
    UPDATE = "update"


_SHARED = {SpikeRule.LOSS_TIMES, SpikeRule.LOSS_SCORE, SpikeRule.NORM_TIMES, SpikeRule.NORM_SCORE}  # by all replicas


class LossLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When a loss raises an alarm, and what the job does about a spike."""

    stance: Stance = Stance.ACT  # on a loss that is not finite
    policy: LossPolicy = LossPolicy.ALERT  # on what the rules below find
    skip_batches: int = 1  # that skip-batches and rewind-and-skip leave out
    lower_to: float = 0.5  # of the learning rate, by lower-lr
    lower_steps: int = 100  # for so long
    window: int = 128  # steps that a value is compared with; as long nothing is said again
    times: float = 5.0  # the median of the window
    score: float = 20.0  # deviations above the median
    warmup: int = 1000  # steps from which the update rule learns a usual jump
    redone_stance: Stance = Stance.ACT  # on a redone step whose loss differs from the one it had before
    exact: bool = False  # redone steps must have the same losses bit for bit; else that is learned

    @property
    def response(self) -> LossResponse | None:
        """Return the job's response to a spike; None if the job does nothing but report it."""
        match self.policy:
            case LossPolicy.SKIP | LossPolicy.REWIND:
                return LossResponse(policy=self.policy, steps=self.skip_batches)
            case LossPolicy.LOWER:
                return LossResponse(policy=self.policy, steps=self.lower_steps, factor=self.lower_to)
        return None


class SpikeWindow:
    """The most recent values, with their median and spread."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        self._values.append(value)
        insort(self._sorted, value)
        if len(self._values) > self._size:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]

    @property
    def has_enough(self) -> bool:
        return len(self._values) >= _LEAST

    @property
    def median(self) -> float:
        return _median_of(self._sorted)

    @property
    def largest_value(self) -> float:
        return self._sorted[-1]

    def deviation(self) -> float:
        """Return a standard deviation that outliers do not affect."""
        median = self.median
        spread = _median_of(sorted(abs(value - median) for value in self._values))
        return max(_NORMAL * spread, _FLAT * abs(median))


def _median_of(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def times_reason(window: SpikeWindow, value: float, limit: float) -> str:
    """Return in words how many times the window's median this value is; "" unless it is more than `limit` times."""
    if not window.has_enough or window.median <= 0 or value <= limit * window.median:
        return ""
    return f"is {value:.4g}, {value / window.median:.1f} times its median"


def score_reason(window: SpikeWindow, value: float, limit: float) -> str:
    """Return in words by how many deviations this value lies above the median; "" unless it is more than `limit`."""
    if not window.has_enough or value <= window.largest_value:  # most values end here, before anything is sorted
        return ""
    above = (value - window.median) / max(window.deviation(), 1e-300)
    return f"is {value:.4g}, {above:.0f} deviations above its median" if above > limit else ""


class UpdateRule:
    """The update rule of Altenbernd, Wiesner and Kao. It watches the largest RMS of any tensor's Adam step, lr m /
    (sqrt(v) + eps). It fires if this RMS jumps by much more than in the warm-up, while the gradient norm rises."""

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self._seen = 0
        self._mean = 0.0  # jump in the warm-up
        self._before: tuple[int, float, float] | None = None

    def on_update(self, step: int, ratio: float, norm: float) -> str:
        before, self._before = self._before, (step, ratio, norm)
        if before is None or step != before[0] + 1:
            return ""
        jump, rise = abs(ratio - before[1]), norm - before[2]
        self._seen += 1
        usual = self._mean
        if self._seen <= self._warmup:
            self._mean += (jump - self._mean) / self._seen
        if self._seen <= _STEADY or rise <= 0 or jump <= usual * max(_JUMP, 1 / (_ALPHA * sqrt(rise))):
            return ""
        many = f"{jump / usual:.0f} times its usual" if usual else "which was always the same before"
        return f"jumped by {jump:.3g}, {many}, as the gradient norm rose"


class SpikeDetector:
    """Applies all rules to the values of one rank; each rule fires at most once per window."""

    def __init__(self, limits: LossLimits) -> None:
        self.limits = limits
        self._windows: dict[SpikeRule, SpikeWindow] = {}  # of each series, by its first rule
        self._update = UpdateRule(limits.warmup)
        self._quiet: dict[SpikeRule, int] = {}
        self._scaled: set[SpikeRule] = set()  # series in which what is not finite is nothing special

    def on_values(self, told: StepValues) -> list[tuple[SpikeRule, str]]:
        """Return the rules that fire on the values of one step, each with its reason."""
        if told.loss is not None and not isfinite(told.loss):
            return []  # `loss` says so, and nothing else of this step means anything
        own = "its own gradient norm, before the sum over replicas,"
        found = self._judge_value(told.loss, "its loss", SpikeRule.LOSS_TIMES, SpikeRule.LOSS_SCORE)
        found += self._judge_value(told.grad_norm, "its gradient norm", SpikeRule.NORM_TIMES, SpikeRule.NORM_SCORE)
        found += self._judge_value(told.own_norm, own, SpikeRule.OWN_TIMES)
        if told.update is not None and told.grad_norm is not None and isfinite(told.update + told.grad_norm):
            why = self._update.on_update(told.step, told.update, told.grad_norm)
            found += [(SpikeRule.UPDATE, f"its largest update {why}")] if why else []
        return [(rule, why) for rule, why in found if self._is_first(rule, told.step)]

    def _judge_value(
        self, value: float | None, what: str, times: SpikeRule, score: SpikeRule | None = None
    ) -> list[tuple[SpikeRule, str]]:
        """Return the rules that fire on this value, each with its reason. `what` names the value in words.

        The rule `times` compares the value with the median of recent values, `score` with their spread. A rank's own
        gradient norm has no `score` rule: its distribution has heavy tails, and the rule detected no injected fault.
        """
        if value is None:
            return []
        window = self._windows.setdefault(times, SpikeWindow(self.limits.window))
        if not isfinite(value):
            first = window.has_enough and times not in self._scaled
            self._scaled.add(times)
            return [(times, f"{what} is {value}")] if first else []
        judged = [(times, times_reason(window, value, self.limits.times))]
        if score is not None:
            judged.append((score, score_reason(window, value, self.limits.score)))
        window.add(value)
        return [(rule, f"{what} {why}") for rule, why in judged if why]

    def _is_first(self, rule: SpikeRule, step: int) -> bool:
        quiet_until = self._quiet.get(rule, -1)
        self._quiet[rule] = step + self.limits.window
        return step >= quiet_until


def policy_hindrance(limits: LossLimits, told: StepValues, skippable: bool, eases: tuple[Ease, ...]) -> str:
    """Return why the user's policy for bad losses cannot be applied to the step `told`; empty if it can. `skippable`
    says whether the script can skip batches. `eases` are steps with a lowered learning rate."""
    if not told.numbered:
        return "nobody knows the number of this step, so there is no state to go back to"
    if limits.policy in (LossPolicy.SKIP, LossPolicy.REWIND) and not skippable:
        return (
            f"loss.policy={limits.policy} takes a script that asks holdfast.skip(step) or uses holdfast.batches(loader)"
        )
    if limits.policy is LossPolicy.LOWER and any(ease.first <= told.step <= ease.last for ease in eases):
        return "the learning rate of this step is lowered already"  # it was gone back for: its loss is the same again
    return ""


def alarm_of(
    node: str, told: StepValues, rules: list[tuple[SpikeRule, str]], limits: LossLimits, hindered: str = ""
) -> Alarm:
    """Return one alarm for everything that stood out in one step of one rank."""
    response = limits.response if any(rule in _SHARED for rule, _ in rules) else None
    stance = Stance.OBSERVE if limits.policy is LossPolicy.IGNORE else Stance.NOTIFY
    why = "; ".join(why for _, why in rules)
    if response and hindered:
        why, response = f"{why}; it is only told of: {hindered}", None
    elif response:
        stance = Stance.ACT
    goes_on = response is not None and response.policy is LossPolicy.SKIP  # from the newest state
    return Alarm(
        kind=Kind.LOSS,
        at=told.at,
        suspects=(node,),
        ranks=(told.rank,),
        generation=told.generation,
        reason=f"stands out at step {told.step}{'' if told.numbered else ' after the launch'}: {why}",
        signature=f"spike {rules[0][0]}" + (f" {told.rank}" if rules[0][0] is SpikeRule.OWN_TIMES else ""),
        evidence=tuple(rule.value for rule, _ in rules),
        stance=stance,
        policy=response.encode_text() if response else "",
        not_after=None if goes_on or not told.numbered else told.step - 1,
    )
