"""The interval between checkpoints follows from what one costs and how often one is needed."""

from math import sqrt

import pytest

from holdfast.core.snapshots.checkpoint_interval import best_interval


def test_young_and_daly() -> None:
    found = best_interval(cost_s=10.0, failures_per_day=24.0)
    assert found.every_s == pytest.approx(sqrt(2 * 10.0 * 3600.0))
    assert "a failure every 1 h" in found.reason


def test_bounds() -> None:
    assert best_interval(cost_s=0.0, failures_per_day=1000.0).every_s == 60.0
    assert best_interval(cost_s=100.0, failures_per_day=0.001).every_s == 3600.0
    assert best_interval(cost_s=1.0, failures_per_day=0.0).every_s == 3600.0


def test_more_failures_mean_more_checkpoints() -> None:
    times = [best_interval(cost_s=5.0, failures_per_day=n).every_s for n in (1, 4, 16)]
    assert times == sorted(times, reverse=True)
