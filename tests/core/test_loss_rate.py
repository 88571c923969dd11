"""How often nodes are lost, and how many standbys follow."""

from random import Random

import pytest

from holdfast.core.membership.loss_rate import LossRate, NodeLosses, advise_standbys

DAY_H = 24.0


def test_without_runs_published_rates_count_and_that_is_said() -> None:
    told = advise_standbys(1024, DAY_H, NodeLosses())
    assert 4 <= told.standbys <= 13  # of the published rates the lowest needs 4, the highest 13
    per_100_h = " to ".join(f"{100 * LossRate().quantile(share):.2g}" for share in (0.05, 0.95))
    assert told.reason == (
        f"{told.standbys} standbys: no past run tells how often nodes are lost, so published rates count"
        f" ({per_100_h} per 100 node-hours, 90 %), each replaced within 24 h"
    )
    low, high = (24 * LossRate().quantile(share) for share in (0.05, 0.95))
    assert low < 0.0012 and 0.0065 < high < 0.02


def test_many_losses_count_for_themselves() -> None:
    seen = NodeLosses(runs=9, lost=14, node_h=3120)
    rate = LossRate().after(seen)
    low, high = rate.quantile(0.05), rate.quantile(0.95)
    assert low < 14 / 3120 < high and low == pytest.approx(0.0028, rel=0.1) and high == pytest.approx(0.0066, rel=0.1)
    told = advise_standbys(100, 0.5, seen)
    assert told.reason == (
        "2 standbys: 14 nodes lost in 3,120 node-hours of 9 past runs (0.27 to 0.66 per 100 node-hours, 90 %), "
        "each replaced within 30 min"
    )


def test_many_hours_without_a_loss_need_few() -> None:
    needs = [advise_standbys(1024, DAY_H, NodeLosses(runs=1, node_h=hours)).standbys for hours in (0, 1e4, 1e5, 1e7)]
    assert needs == sorted(needs, reverse=True) and needs[-1] == 1


def test_the_number_covers_what_happens() -> None:
    """Rates as the prior has them; each shows itself in a run, and then on days for which standbys are held."""
    chance, short, days = Random(5), 0, 3000
    for _ in range(days):
        rate = chance.gammavariate(2.0, 0.0029 / 24 / 2)
        lost = _poisson(chance, rate * 20_000)
        held = LossRate().after(NodeLosses(runs=1, lost=lost, node_h=20_000)).most_lost(200, DAY_H)
        short += _poisson(chance, rate * 200 * DAY_H) > held
    assert 0 < short < 0.02 * days


def test_no_more_than_all_nodes_and_at_least_one() -> None:
    assert advise_standbys(3, DAY_H, NodeLosses(runs=2, lost=500, node_h=10)).standbys == 3
    told = advise_standbys(1, 0.1, NodeLosses(runs=1, node_h=5e6))
    assert told.standbys == 1 and told.reason.startswith("1 standby: 0 nodes lost")


def test_large_numbers_are_within_what_numbers_hold() -> None:
    rate = LossRate().after(NodeLosses(runs=1, lost=20_000, node_h=1e7))
    assert rate.quantile(0.5) == pytest.approx(0.002, rel=0.01)
    assert rate.most_lost(16_384, DAY_H) == pytest.approx(786 + 2.33 * 28, abs=10)


def _poisson(chance: Random, mean: float) -> int:
    count, left = 0, chance.expovariate(1.0)
    while left < mean:
        count, left = count + 1, left + chance.expovariate(1.0)
    return count
