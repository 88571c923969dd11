"""Both ways of replaying, simulated: rates as reckoned, and where one costs less than the other."""

from random import Random

import msgspec
import pytest

from holdfast.core.replay import detection_odds
from holdfast.core.replay.node_grid import UnfitError
from holdfast.core.replay.regrouped_replay import RulingKind
from holdfast.core.replay.twin_ruling import TwinComparison, TwinLimits
from holdfast.sim.replay_study import (
    ReplaySetup,
    dual_cost,
    find_crossing,
    halves_cost,
    plan_replay,
    play_halves,
    run_study,
)

SMALL = ReplaySetup(nodes=48, replica=4, stages=4, trials=300, most=100, launch_s=55.0, group_launch_s=30.0)


def near(found: int, trials: int, wanted: float) -> bool:
    low, high = detection_odds.wilson_interval(found, trials, z=3.5)
    return low <= wanted <= high


@pytest.mark.parametrize("changes", [{}, {"stages": 2}, {"replica": 1, "stages": 1, "nodes": 24, "steps": 1}])
def test_rates_are_as_reckoned(changes: dict[str, int]) -> None:
    found = run_study(msgspec.structs.replace(SMALL, **changes), (1.0, 0.5, 0.2))
    assert [line.repeats for line in found.lines] == [1, 6, 17]
    for line in found.lines:
        assert near(line.dual.found, line.dual.trials, line.dual.reckoned)
        assert near(line.halves.found, line.halves.trials, line.halves.reckoned)
    assert found.two.held == found.two.trials


@pytest.mark.parametrize("q", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("stages", [4, 2])
def test_costs_are_as_reckoned(q: float, stages: int) -> None:
    setup = msgspec.structs.replace(SMALL, trials=600, stages=stages)
    (line,) = run_study(setup, (q,)).lines
    each = line.dual.found / line.dual.trials
    assert line.dual_cost / each == pytest.approx(dual_cost(setup, q, 30.0), rel=0.15)
    each = line.halves.found / line.halves.trials
    assert line.halves_cost / each == pytest.approx(halves_cost(setup, q, 55.0, 30.0), rel=0.15)


def test_a_seed_gives_the_same_again() -> None:
    assert run_study(SMALL, (0.5,)) == run_study(SMALL, (0.5,))


def test_where_the_costs_cross() -> None:
    """Halves need the fault to show once, so by steps alone they never cost more, but for the referee's."""
    one, five = find_crossing(SMALL, 1), find_crossing(SMALL, 5)
    assert one.by_steps == 1.0 and five.by_steps is None
    assert one.with_launches is not None and 0.5 < one.with_launches < 1.0
    assert five.with_launches is None
    at, above = one.with_launches, min(1.0, one.with_launches * 1.05)
    setup = msgspec.structs.replace(SMALL, steps=1)
    assert dual_cost(setup, above, 30.0) <= halves_cost(setup, above, 55.0, 30.0)
    assert dual_cost(setup, at * 0.9, 30.0) > halves_cost(setup, at * 0.9, 55.0, 30.0)


def test_every_place_is_found_by_halves() -> None:
    nodes = tuple(tuple((f"r{r}s{s}a", f"r{r}s{s}b") for s in range(3)) for r in range(4))
    for r in range(4):
        for s in range(3):
            ruling = play_halves(TwinComparison(nodes, TwinLimits()), (r, s, 1), 0.3, Random(r * 3 + s))
            assert (ruling.how, ruling.nodes) == (RulingKind.ONE, (f"r{r}s{s}b",))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group": 6}, "does not hold whole replicas of 4"),
        ({"group": 12}, "m > n"),
        ({"stages": 3}, "are not 3 stages"),
        ({"nodes": 8}, "that takes 16"),
    ],
)
def test_what_does_not_fit(changes: dict[str, int], words: str) -> None:
    with pytest.raises(UnfitError, match=words):
        plan_replay(msgspec.structs.replace(SMALL, **changes))


def test_the_layout_of_the_paper() -> None:
    made = plan_replay(ReplaySetup(group=8, launch_s=1.0, group_launch_s=1.0))
    assert (made.m, made.n) == (8, 150)
