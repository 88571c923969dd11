"""What stands out is said once; what does not, and what cannot be judged, is not."""

import math
import random
from typing import Any

import pytest

from holdfast.core.detect.loss_spikes import (
    LossLimits,
    SpikeDetector,
    SpikeRule,
    SpikeWindow,
    UpdateRule,
    alarm_of,
    policy_hindrance,
    score_reason,
    times_reason,
)
from holdfast.model.detector_alarm import Alarm, Stance
from holdfast.model.loss_response import Ease, LossPolicy
from holdfast.model.observation import StepValues

LIMITS = LossLimits(window=32)


def told(step: int, **more: Any) -> StepValues:
    return StepValues(generation=1, rank=0, step=step, at=10.0, **more)


def noisy(count: int, seed: int = 1) -> list[float]:
    dice = random.Random(seed)
    return [2.0 + dice.gauss(0, 0.05) for _ in range(count)]


def fed(values: list[float]) -> SpikeDetector:
    spikes = SpikeDetector(LIMITS)
    for step, value in enumerate(values):
        assert spikes.on_values(told(step, loss=value)) == []
    return spikes


def rules(found: list[tuple[SpikeRule, str]]) -> list[SpikeRule]:
    return [rule for rule, _ in found]


def test_a_window_knows_its_middle_and_forgets_what_is_old() -> None:
    window = SpikeWindow(16)
    for value in (*range(100), *range(16)):
        window.add(float(value))
    assert (window.median, window.largest_value) == (7.5, 15.0)
    assert window.deviation() == 1.4826 * 4


def test_five_times_the_median_is_a_spike() -> None:
    spikes = fed(noisy(40))
    assert rules(spikes.on_values(told(40, loss=10.5))) == ["loss times", "loss score"]


def test_less_than_that_is_one_by_deviations_where_values_hardly_vary() -> None:
    spikes = fed(noisy(40))
    found = spikes.on_values(told(40, loss=4.0))
    assert rules(found) == ["loss score"]


def test_a_falling_loss_and_a_low_one_are_none() -> None:
    fed([10.0 - step / 10 for step in range(99)])


def test_nothing_is_judged_before_enough_was_seen() -> None:
    spikes = fed(noisy(15))
    assert spikes.on_values(told(15, loss=100.0)) == []


def test_a_median_that_is_not_positive_has_no_multiples() -> None:
    window = SpikeWindow(16)
    for value in range(16):
        window.add(-float(value))
    assert times_reason(window, 100.0, 5.0) == ""
    assert score_reason(window, 100.0, 5.0)


def test_values_that_are_not_finite_are_left_to_others() -> None:
    spikes = fed(noisy(40))
    assert spikes.on_values(told(40, loss=math.nan, update=math.nan, own_norm=math.nan)) == []
    assert rules(spikes.on_values(told(41, loss=20.0))), "and do not spoil the window"


def test_a_norm_that_is_not_finite_is_told_once_and_not_where_losses_are_scaled() -> None:
    spikes, scaled = SpikeDetector(LIMITS), SpikeDetector(LIMITS)
    for step in range(40):
        assert spikes.on_values(told(step, grad_norm=1.0)) == []
        assert scaled.on_values(told(step, grad_norm=1.0 if step else math.inf)) == []
    assert rules(spikes.on_values(told(40, grad_norm=math.inf))) == ["norm times"]
    assert spikes.on_values(told(400, grad_norm=math.inf)) == []
    assert scaled.on_values(told(40, grad_norm=math.inf)) == []


def test_flat_values_have_a_least_spread() -> None:
    spikes = fed([2.0] * 40)
    assert spikes.on_values(told(40, loss=2.001)) == []
    assert rules(spikes.on_values(told(41, loss=2.1))) == ["loss score"]


def test_the_same_is_not_said_again_for_a_window() -> None:
    spikes = fed(noisy(40))
    assert spikes.on_values(told(40, loss=30.0))
    assert all(spikes.on_values(told(step, loss=30.0)) == [] for step in range(41, 60))


def updates(count: int, rule: UpdateRule) -> None:
    dice = random.Random(3)
    for step in range(count):
        assert rule.on_update(step, 1e-3 + dice.uniform(-1e-5, 1e-5), 0.5 + dice.uniform(-0.1, 0.1)) == ""


def test_an_update_that_jumps_no_further_than_usual_is_none_however_large_norms_are() -> None:
    rule, dice = UpdateRule(1000), random.Random(3)
    for step in range(50):
        assert rule.on_update(step, 1e-3 + dice.uniform(-1e-5, 1e-5), 1e10 * dice.uniform(0.5, 1.5)) == ""
    assert rule.on_update(50, 5e-3, 2e10)
    flat = UpdateRule(1000)
    for step in range(20):
        assert flat.on_update(step, 1e-3, 1.0 + step) == ""
    assert flat.on_update(20, 2e-3, 30.0) == (
        "jumped by 0.001, which was always the same before, as the gradient norm rose"
    )


def test_an_update_that_jumps_as_the_gradient_rises_is_one() -> None:
    rule = UpdateRule(1000)
    updates(50, rule)
    assert rule.on_update(50, 5e-3, 3.0)


def test_a_jump_with_a_falling_gradient_or_after_a_gap_is_none() -> None:
    rule = UpdateRule(1000)
    updates(50, rule)
    assert rule.on_update(50, 5e-3, 0.1) == ""
    updates(50, other := UpdateRule(1000))
    assert other.on_update(51, 5e-3, 3.0) == "", "the step before was not seen"


LOSS = [(SpikeRule.LOSS_TIMES, "its loss is 9")]
EASES = (Ease(first=40, last=49, factor=0.5),)


def alarm(limits: LossLimits, rules: list[tuple[SpikeRule, str]] = LOSS, hindered: str = "") -> Alarm:
    return alarm_of("n1", told(40, loss=9.0), rules, limits, hindered)


def test_the_alarm_names_the_step_before_as_good() -> None:
    loss = alarm(LIMITS)
    assert (loss.not_after, loss.stance, loss.suspects, loss.hard) == (39, Stance.NOTIFY, ("n1",), False)
    own = alarm(LIMITS, [(SpikeRule.OWN_TIMES, "")])
    assert own.signature != loss.signature and own.signature.endswith("0"), "a rank's own is told apart by rank"


@pytest.mark.parametrize(
    ("limits", "stance", "policy", "not_after"),
    [
        (LossLimits(policy=LossPolicy.IGNORE), Stance.OBSERVE, "", 39),
        (LossLimits(), Stance.NOTIFY, "", 39),
        (LossLimits(policy=LossPolicy.SKIP, skip_batches=3), Stance.ACT, "skip-batches:3", None),
        (LossLimits(policy=LossPolicy.REWIND), Stance.ACT, "rewind-and-skip:1", 39),
        (LossLimits(policy=LossPolicy.LOWER, lower_to=0.1, lower_steps=50), Stance.ACT, "lower-lr:0.1:50", 39),
    ],
)
def test_what_the_user_wants_is_what_the_alarm_is_for(
    limits: LossLimits, stance: Stance, policy: str, not_after: int | None
) -> None:
    found = alarm(limits, [(SpikeRule.UPDATE, "jumped"), *LOSS])
    assert (found.stance, found.policy, found.not_after) == (stance, policy, not_after)


@pytest.mark.parametrize("rule", [SpikeRule.OWN_TIMES, SpikeRule.UPDATE])
def test_only_what_ranks_share_is_acted_on(rule: SpikeRule) -> None:
    found = alarm(LossLimits(policy=LossPolicy.REWIND), [(rule, "why")])
    assert (found.stance, found.policy, found.not_after) == (Stance.NOTIFY, "", 39)
    assert alarm(LossLimits(policy=LossPolicy.REWIND), [(SpikeRule.NORM_SCORE, "why")]).stance is Stance.ACT


def test_what_cannot_be_done_is_told() -> None:
    for policy in (LossPolicy.SKIP, LossPolicy.REWIND):
        limits = LossLimits(policy=policy)
        assert policy_hindrance(limits, told(40), True, EASES) == ""
        why = policy_hindrance(limits, told(40), False, ())
        found = alarm(limits, hindered=why)
        assert (found.stance, found.policy, found.not_after) == (Stance.NOTIFY, "", 39)
        assert f"loss.policy={policy}" in found.reason and "holdfast.skip(step)" in found.reason
    lower = LossLimits(policy=LossPolicy.LOWER)
    assert policy_hindrance(lower, told(39), False, EASES) == policy_hindrance(lower, told(50), False, EASES) == ""
    assert policy_hindrance(lower, told(40), False, EASES)
    assert alarm(LossLimits(), hindered="why").reason == alarm(LossLimits()).reason
    assert policy_hindrance(LossLimits(), told(40), False, EASES) == ""
