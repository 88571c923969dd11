"""How many standbys: the published numbers, and what groups and switches add to them."""

from itertools import product
from random import Random

import pytest

from holdfast.core.sizing import Losses, added, binomial, poisson, quantile, size


@pytest.mark.parametrize(("nodes", "standbys"), [(128, 2), (256, 2), (512, 3), (1024, 4)])
def test_the_published_numbers(nodes: int, standbys: int) -> None:
    assert binomial(nodes, 0.0012) == standbys


def test_other_rates() -> None:
    assert [binomial(nodes, 0.0065) for nodes in (128, 256, 512, 1024)] == [4, 5, 8, 13]
    assert [binomial(nodes, 0.00234) for nodes in (128, 256, 512, 1024)] == [2, 3, 4, 7]
    assert binomial(7, 0.0) == 0 and binomial(3, 1.0) == 3


def test_groups_and_switches_need_more() -> None:
    alone = size(Losses(nodes=1024, p=0.0012))
    grouped = size(Losses(nodes=1024, p=0.0012, group=8, group_share=0.086))
    blasted = size(Losses(nodes=1024, p=0.0012, group=8, group_share=0.086, blast=32, blasts=0.012))
    assert alone.plain == grouped.plain == blasted.plain == 4
    assert alone.ours == 4 and alone.short < 0.01
    assert grouped.ours >= 8 and grouped.short > 0.05
    assert blasted.ours >= 32


def test_against_chance_itself() -> None:
    losses = Losses(nodes=200, p=0.01, group=6, group_share=0.2, blast=20, blasts=0.02)
    chance = Random(1)

    def events(mean: float) -> int:
        count, left = 0, chance.expovariate(1.0)
        while left < mean:
            count, left = count + 1, left + chance.expovariate(1.0)
        return count

    drawn = sorted(events(1.6) + 6 * events(0.4) + 20 * events(0.02) for _ in range(40_000))
    assert abs(size(losses).ours - drawn[int(0.99 * len(drawn))]) <= 1


@pytest.mark.parametrize(("mean", "each"), [*product((0.0, 0.3, 5.0), (1, 4))])
def test_distributions_add_up(mean: float, each: int) -> None:
    found = poisson(mean, each, 200)
    assert abs(sum(found) - 1) < 1e-6
    assert abs(sum(at * chance for at, chance in enumerate(found)) - mean * each) < 1e-3
    both = added(found, found, 200)
    assert abs(sum(both) - 1) < 1e-6
    assert quantile(both, 0.5) >= quantile(found, 0.5)


def test_large_jobs_are_within_what_numbers_hold() -> None:
    assert 120 <= binomial(16384, 0.0065) <= 135
    assert (binomial(1000, 0.0), binomial(1000, 1.0)) == (0, 1000)
