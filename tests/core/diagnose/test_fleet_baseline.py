"""Values against the fleet and against a node's own past."""

import random

import pytest

from holdfast.core.diagnose.fleet_baseline import KEPT, MeasurementHistory, below_fleet, below_own_past, shortfall


def around(middle: float, spread: float, count: int, chance: random.Random) -> list[float]:
    return [chance.gauss(middle, middle * spread) for _ in range(count)]


def healthy(count: int, seed: int = 1, middle: float = 1000.0) -> dict[str, list[float]]:
    """Machines differ by half a percent, their measurements by as much."""
    chance = random.Random(seed)
    return {f"n{i}": around(chance.gauss(middle, middle * 0.005), 0.005, 20, chance) for i in range(count)}


def test_shortfall_is_the_part_that_is_missing_and_one_sided() -> None:
    assert shortfall([96.0] * 5, [100.0] * 7) == pytest.approx(0.04)
    assert shortfall([104.0] * 5, [100.0] * 7) == 0.0
    assert shortfall([104.0] * 5, [100.0] * 7, lower=True) == pytest.approx(0.04)
    # Half of the time well, half of the time much slower: the mean hides little, the area hides nothing.
    assert shortfall([100.0, 60.0] * 10, [100.0] * 20) == pytest.approx(0.22, abs=0.02)


@pytest.mark.parametrize("count", [3, 4, 8, 64])
def test_a_healthy_fleet_names_nobody(count: int) -> None:
    for seed in range(40):
        assert below_fleet(healthy(count, seed)) == {}


@pytest.mark.parametrize(("count", "drop"), [(3, 0.3), (4, 0.2), (8, 0.1), (64, 0.05)])
def test_one_that_falls_short_is_named(count: int, drop: float) -> None:
    for seed in range(20):
        measured = healthy(count, seed)
        measured["n1"] = [value * (1 - drop) for value in measured["n1"]]
        found = below_fleet(measured)
        assert list(found) == ["n1"]
        assert found["n1"].by == pytest.approx(drop, abs=0.02)


def test_times_are_worse_when_they_are_longer() -> None:
    measured = healthy(8)
    measured["n1"] = [value * 1.3 for value in measured["n1"]]
    assert list(below_fleet(measured, lower=True)) == ["n1"]
    assert below_fleet(measured) == {}


def test_several_bad_ones_do_not_move_the_measure() -> None:
    measured = healthy(16)
    for node in ("n1", "n2", "n3", "n4", "n5"):
        measured[node] = [value * 0.85 for value in measured[node]]
    assert sorted(below_fleet(measured)) == ["n1", "n2", "n3", "n4", "n5"]


def test_where_half_and_half_stand_apart_nobody_is_named() -> None:
    measured = healthy(4) | {f"m{i}": values for i, values in enumerate(healthy(4, 2, middle=500.0).values())}
    assert below_fleet(measured) == {}


def test_fewer_than_three_name_nobody() -> None:
    assert below_fleet({"a": [100.0], "b": [1.0]}) == {}
    assert below_fleet({}) == {}


def test_one_hiccup_is_not_a_slow_node() -> None:
    measured = healthy(16)
    measured["n1"][7] *= 0.5
    assert below_fleet(measured) == {}


def test_a_noisy_fleet_of_few_names_nobody() -> None:
    # Four nodes on one busy machine: each measures anything.
    chance = random.Random(3)
    for _ in range(50):
        assert below_fleet({f"n{i}": around(1000.0, 0.15, 10, chance) for i in range(4)}) == {}


def test_worse_than_its_own_past() -> None:
    past = {"a": (100.0, 101.0, 99.5, 100.2), "b": (90.0, 90.3, 89.9, 90.1), "c": (95.0, 95.1, 94.9)}
    assert below_own_past({"a": 100.1, "b": 90.0, "c": 95.0}, past) == {}
    found = below_own_past({"a": 92.0, "b": 90.0, "c": 95.0}, past)
    assert list(found) == ["a"] and found["a"].of == "its own past"
    # All became slower by as much: a new driver, not a node.
    assert below_own_past({"a": 92.0, "b": 82.8, "c": 87.4}, past) == {}
    assert below_own_past({"a": 50.0}, {"a": (100.0, 100.0)}) == {}, "two days are no past"
    assert below_own_past({"a": 112.0}, {"a": (100.0, 100.5, 99.5, 100.0)}, lower=True)


def test_the_past_is_bounded() -> None:
    past = MeasurementHistory()
    for value in range(2 * KEPT):
        past = past.with_value("speed", float(value))
    assert past.medians["speed"] == tuple(map(float, range(KEPT, 2 * KEPT)))
