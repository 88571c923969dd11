"""How many standbys: the published numbers, and what groups and switches add to them."""

import time
from itertools import product
from math import exp
from random import Random

import pytest

from holdfast.core.membership.standby_sizing import LossRates, binomial_quantile, loss_distribution, size_standbys


@pytest.mark.parametrize(("nodes", "standbys"), [(128, 2), (256, 2), (512, 3), (1024, 4)])
def test_the_published_numbers(nodes: int, standbys: int) -> None:
    assert binomial_quantile(nodes, 0.0012) == standbys


def test_other_rates() -> None:
    assert [binomial_quantile(nodes, 0.0065) for nodes in (128, 256, 512, 1024)] == [4, 5, 8, 13]
    assert [binomial_quantile(nodes, 0.00234) for nodes in (128, 256, 512, 1024)] == [2, 3, 4, 7]
    assert binomial_quantile(7, 0.0) == 0 and binomial_quantile(3, 1.0) == 3


def test_groups_and_switches_need_more() -> None:
    alone = size_standbys(LossRates(nodes=1024, p=0.0012))
    grouped = size_standbys(LossRates(nodes=1024, p=0.0012, group=8, group_share=0.086))
    blasted = size_standbys(LossRates(nodes=1024, p=0.0012, group=8, group_share=0.086, blasts=((0.012, 32),)))
    assert alone.plain == grouped.plain == blasted.plain == 4
    assert alone.ours == 4 and alone.short < 0.01
    assert grouped.ours >= 8 and grouped.short > 0.05
    assert blasted.ours >= 32


def test_against_chance_itself() -> None:
    losses = LossRates(nodes=200, p=0.01, group=6, group_share=0.2, blasts=((0.02, 20),))
    chance = Random(1)

    def events(mean: float) -> int:
        count, left = 0, chance.expovariate(1.0)
        while left < mean:
            count, left = count + 1, left + chance.expovariate(1.0)
        return count

    drawn = sorted(events(1.6) + 6 * events(0.4) + 20 * events(0.02) for _ in range(40_000))
    assert abs(size_standbys(losses).ours - drawn[int(0.99 * len(drawn))]) <= 1


@pytest.mark.parametrize(("mean", "each"), [*product((0.0, 0.3, 5.0, 2000.0), (1, 4))])
def test_distributions_add_up(mean: float, each: int) -> None:
    found = list(loss_distribution([(mean, each)], 10_000))
    assert len(found) == 10_001 and abs(sum(found) - 1) < 1e-6
    assert abs(sum(at * chance for at, chance in enumerate(found)) - mean * each) < 1e-3
    both = list(loss_distribution([(mean, each), (mean, each)], 20_000))
    assert abs(sum(at * chance for at, chance in enumerate(both)) - 2 * mean * each) < 1e-3


def test_what_is_beyond_the_job_is_all_of_it() -> None:
    found = list(loss_distribution([(0.5, 1), (0.1, 32)], 8))
    assert len(found) == 9 and sum(found) == pytest.approx(1)
    assert found[8] == pytest.approx(1 - exp(-0.1), rel=1e-3)  # one switch is more than there is
    assert size_standbys(LossRates(nodes=1, p=0.03, blasts=((3.0, 5),))).short == 0.0  # more than all cannot be lost


def test_large_jobs_are_within_what_numbers_hold() -> None:
    assert 120 <= binomial_quantile(16384, 0.0065) <= 135
    assert (binomial_quantile(1000, 0.0), binomial_quantile(1000, 1.0)) == (0, 1000)


def test_means_whose_chance_of_nothing_no_float_holds() -> None:
    assert size_standbys(LossRates(nodes=2000, p=0.45)).ours == pytest.approx(
        900 + 2.33 * 30, abs=3
    )  # a normal distribution
    blasts = ((0.01 * 1_200, 32),)
    halved = size_standbys(LossRates(nodes=500_000, p=0.0012, group=8, group_share=15 / 175, blasts=((6.0, 32),))).ours
    whole = size_standbys(LossRates(nodes=1_000_000, p=0.0012, group=8, group_share=15 / 175, blasts=blasts)).ours
    assert 1.8 * halved < whole < 2 * halved  # of twice the mean the spread is less than twice as wide


def test_a_million_nodes_most_of_which_fail_are_no_long_work() -> None:
    began = time.process_time()
    found = size_standbys(LossRates(nodes=1_000_000, p=0.9, group=8, group_share=15 / 175, blasts=((9000.0, 32),)))
    assert (found.plain, found.ours) == (900_697, 1_000_000)
    assert time.process_time() - began < 60
