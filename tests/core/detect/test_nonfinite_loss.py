"""Which ranks a bad loss names."""

from math import nan

from holdfast.core.detect.nonfinite_loss import add_alike, alarm_of
from holdfast.model.observation import Loss


def bad(rank: int, step: int) -> Loss:
    return Loss(node="n0", generation=1, rank=rank, step=step, loss=nan, at=5.0)


def test_ranks_with_the_same_bad_loss_are_in_one_alarm() -> None:
    first, second, later = map(alarm_of, add_alike([bad(1, 20), bad(0, 20), bad(2, 21)]))
    assert first.ranks == second.ranks == (0, 1) and first.reason == "has a loss of nan since step 20"
    assert later.ranks == (2,)
