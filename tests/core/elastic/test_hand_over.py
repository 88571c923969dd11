"""Which layers go where before workers leave."""

from holdfast.core.elastic.hand_over import plan_hand_over
from holdfast.model.pipeline_routes import LayerTransfer

GRID = ((0, 1), (2, 3), (0, 1), (2, 3))


def test_layers_that_others_hold_stay_where_they_are() -> None:
    assert plan_hand_over(GRID, (1,)) == ()


def test_layers_that_only_they_hold_go_to_whoever_has_least() -> None:
    assert plan_hand_over((*GRID, ()), (1, 3)) == (LayerTransfer(2, 1, 4), LayerTransfer(3, 1, 4))
    assert plan_hand_over(((0, 1, 2), (3, 4, 5), (6,)), (1,)) == (
        LayerTransfer(3, 1, 2),
        LayerTransfer(4, 1, 2),
        LayerTransfer(5, 1, 0),
    )


def test_nobody_is_left_to_take_them() -> None:
    assert plan_hand_over(GRID, (0, 1, 2, 3)) == ()
    assert plan_hand_over((), ()) == ()
