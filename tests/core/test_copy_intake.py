"""Copies that come in: begun, gone on with, not taken twice, and not taken from a generation that is over."""

import pytest

from holdfast.core.snapshots.copy_intake import CopyName, Intake, judge_copy, judge_half, refuse_generation


def name(step: int, generation: int = 1) -> CopyName:
    return CopyName(step=step, generation=generation)


def test_a_copy_is_begun_gone_on_with_or_here() -> None:
    assert judge_copy(name(5), None, []) is Intake.BEGIN
    assert judge_copy(name(5), name(4), [name(3)]) is Intake.BEGIN
    assert judge_copy(name(5), name(5), [name(3)]) is Intake.RESUME
    assert judge_copy(name(5), None, [name(5), name(3)]) is Intake.HELD
    assert judge_copy(name(5, 2), None, [name(5, 1)]) is Intake.BEGIN, "another generation made it anew"


@pytest.mark.parametrize(
    ("mixing", "newest", "expected"),
    [
        (-1, -1, Intake.BEGIN),
        (4, 3, Intake.BEGIN),
        (5, 3, Intake.RESUME),
        (-1, 5, Intake.HELD),
        (6, 5, Intake.HELD),
        (6, 3, Intake.SUPERSEDED),
        (-1, 6, Intake.SUPERSEDED),
    ],
)
def test_a_half_of_step_5(mixing: int, newest: int, expected: Intake) -> None:
    assert judge_half(5, mixing, newest) is expected


def test_a_generation_that_is_over_is_refused() -> None:
    assert refuse_generation(2, 2) == ""
    assert refuse_generation(1, 2) == "generation 1 is over; this node is in 2"
