"""Which layers go where before workers leave."""

from random import Random

from holdfast.core.elastic.hand_over import DeparturePlan, plan_departure, plan_hand_over
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


def test_what_does_not_fit_into_memory_is_saved() -> None:
    held = ((0, 1), (2, 3))
    assert plan_departure(held, (1,), migrates=True, saves=True).transfers == plan_hand_over(held, (1,)) != ()
    assert plan_departure(held, (1,), migrates=True, saves=True, capacity=2) == DeparturePlan(saves=True)
    assert plan_departure(held, (1,), migrates=False, saves=True) == DeparturePlan(saves=True)
    assert plan_departure(held, (1,), migrates=False, saves=False) == DeparturePlan(given_up=2)
    assert plan_departure(GRID, (1,), migrates=False, saves=True) == DeparturePlan()


def test_no_layer_is_without_a_place_if_it_may_be_handed_over_or_saved() -> None:
    rng = Random(1)
    for _ in range(500):
        workers, layers = rng.randint(1, 6), rng.randint(1, 8)
        held = tuple(tuple(sorted(rng.sample(range(layers), rng.randint(0, layers)))) for _ in range(workers))
        leaving = rng.sample(range(workers), rng.randint(0, workers))
        capacity = rng.choice([0, layers, max(map(len, held))])
        found = plan_departure(held, leaving, migrates=True, saves=True, capacity=capacity)
        after = [set(mine) | {one.layer for one in found.transfers if one.target == w} for w, mine in enumerate(held)]
        left = {layer for w, mine in enumerate(after) if w not in leaving for layer in mine}
        assert found.saves or left == {layer for mine in held for layer in mine}
        assert found.given_up == 0 and not (found.saves and found.transfers)
        assert all(len(mine) <= (capacity or layers) for mine in after)
