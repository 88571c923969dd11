"""From what the user wants done about a spike to the steps that are left out or eased."""

import pytest

from holdfast.core.detect.loss_spikes import LossLimits
from holdfast.core.incident.loss_remedy import apply_response, describe_remedy
from holdfast.model.loss_response import Ease, LossPolicy, LossResponse, Skip, parse_response

NEWEST, NOT_AFTER = 44, 39  # step 40 stood out


def answered(limits: LossLimits, not_after: int | None = NOT_AFTER) -> tuple[tuple[Skip, ...], tuple[Ease, ...]]:
    return apply_response(limits.response, NEWEST, not_after)


@pytest.mark.parametrize("policy", [LossPolicy.IGNORE, LossPolicy.ALERT])
def test_what_is_only_told_changes_nothing(policy: LossPolicy) -> None:
    assert answered(LossLimits(policy=policy)) == ((), ())
    assert parse_response(str(policy)) is None


@pytest.mark.parametrize("not_after", [None, NOT_AFTER])
def test_the_next_batches_are_left_out(not_after: int | None) -> None:
    skips, eases = answered(LossLimits(policy=LossPolicy.SKIP, skip_batches=3), not_after)
    assert (skips, eases) == ((Skip(first=45, last=47),), ())


def test_the_bad_batch_and_those_after_it_are_left_out() -> None:
    skips, eases = answered(LossLimits(policy=LossPolicy.REWIND))
    assert (skips, eases) == ((Skip(first=40, last=40),), ())
    skips, _ = answered(LossLimits(policy=LossPolicy.REWIND, skip_batches=5))
    assert skips == (Skip(first=40, last=44),)


def test_steps_from_the_bad_one_on_are_eased() -> None:
    skips, eases = answered(LossLimits(policy=LossPolicy.LOWER, lower_to=1 / 3, lower_steps=10))
    assert (skips, eases) == ((), (Ease(first=40, last=49, factor=1 / 3),)), "to the last digit"


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (LossResponse(policy=LossPolicy.SKIP, steps=3), "skip-batches:3"),
        (LossResponse(policy=LossPolicy.REWIND, steps=1), "rewind-and-skip:1"),
        (LossResponse(policy=LossPolicy.LOWER, steps=10, factor=1 / 3), "lower-lr:0.3333333333333333:10"),
    ],
)
def test_an_alarm_carries_it_as_text(response: LossResponse, text: str) -> None:
    assert (response.encode_text(), parse_response(text)) == (text, response)


@pytest.mark.parametrize("text", ["", "dance", "skip-batches", "skip-batches:x", "lower-lr:0.5", "lower-lr:x:3", ":3"])
def test_what_no_version_wrote_is_no_response(text: str) -> None:
    assert parse_response(text) is None


def test_it_is_said() -> None:
    skips, eases = answered(LossLimits(policy=LossPolicy.REWIND, skip_batches=2))
    assert describe_remedy(skips, eases) == "the loss stood out: the batches of steps 40 to 41 are left out"
    skips, eases = answered(LossLimits(policy=LossPolicy.LOWER, lower_steps=10))
    assert describe_remedy(skips, eases) == "the loss stood out: steps 40 to 49 at 0.5 of the learning rate"
