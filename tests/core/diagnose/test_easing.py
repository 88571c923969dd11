import pytest

from holdfast.core.diagnose import easing
from holdfast.model.release import Ease, Skip


def test_policies_become_steps() -> None:
    assert easing.answer("skip-batches:2", 110, None) == ((Skip(first=111, last=112),), ())
    assert easing.answer("rewind-and-skip:3", 110, 104) == ((Skip(first=105, last=107),), ())
    assert easing.answer("lower-lr:0.5:100", 110, 104) == ((), (Ease(first=105, last=204, factor=0.5),))


@pytest.mark.parametrize("policy", ["", "alert", "ignore"])
def test_others_change_nothing(policy: str) -> None:
    assert easing.answer(policy, 110, 104) == ((), ())


def test_it_is_said_in_words() -> None:
    assert "steps 105 to 107 are left out" in easing.said((Skip(first=105, last=107),), ())
    assert "steps 1 to 9 at 0.5 of the learning rate" in easing.said((), (Ease(first=1, last=9, factor=0.5),))
