"""Speeds of workers and times of layers, from what each worker has timed of its own layers."""

import random

import pytest

from holdfast.core.elastic.measured_speeds import ALIKE, MeasuredSpeeds, fit_speeds

STAGES = ((0, 1, 2), (3, 4, 5))


def timed(speeds: list[float], works: list[float], held: list[tuple[int, ...]]) -> list[dict[int, float]]:
    return [{layer: works[layer] / speed for layer in mine} for speed, mine in zip(speeds, held, strict=True)]


def test_nothing_measured_says_nothing() -> None:
    assert fit_speeds([{}, {}], 4) == MeasuredSpeeds()


def test_workers_that_are_alike_stay_alike_within_noise() -> None:
    draw = random.Random(1)
    noisy = [{layer: 0.01 * draw.uniform(0.92, 1.08) for layer in STAGES[worker % 2]} for worker in range(8)]
    found = fit_speeds(noisy, 6)
    assert (found.speeds, found.layer_s) == ((), ())
    assert found.unit_s == pytest.approx(0.01, rel=0.05)


def test_a_slow_worker_is_beside_its_replica_and_not_its_layers() -> None:
    found = fit_speeds(timed([1, 1, 1, 0.5], [0.02] * 6, [*STAGES, *STAGES]), 6)
    assert found.speeds == (1.0, 1.0, 1.0, 0.5)
    assert found.layer_s == () and found.unit_s == pytest.approx(0.02)


def test_heavy_layers_are_not_slow_workers() -> None:
    found = fit_speeds(timed([1, 1, 1, 1], [0.02] * 5 + [0.06], [*STAGES, *STAGES]), 6)
    assert found.speeds == ()
    assert found.layer_s == (1.0,) * 5 + (3.0,)


def test_both_are_told_apart_through_workers_between_them() -> None:
    works = [0.01, 0.02, 0.02, 0.02, 0.04]
    held: list[tuple[int, ...]] = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]
    speeds = [1.0, 0.5, 1.0, 0.6, 1.0]
    found = fit_speeds(timed(speeds, works, held), 5)
    assert found.speeds == pytest.approx(speeds, abs=0.002)
    assert found.layer_s == pytest.approx((0.5, 1.0, 1.0, 1.0, 2.0), abs=0.002)


def test_who_cannot_be_compared_is_as_fast_as_others() -> None:
    found = fit_speeds([{0: 0.01}, {0: 0.02}, {1: 0.03}, {}], 3)
    assert found.speeds == (1.0, 0.5, 1.0, 1.0)
    assert found.layer_s == pytest.approx((0.5, 1.5, 1.0)), "in units of the layer in the middle"


def test_a_worker_just_beyond_noise_counts_as_slow() -> None:
    assert fit_speeds([{0: 1.0}, {0: 1 / (1 - ALIKE - 0.05)}], 1).speeds == pytest.approx((1.0, 1 - ALIKE - 0.05))


@pytest.mark.parametrize("seed", range(40))
def test_any_speeds_are_found_again(seed: int) -> None:
    draw = random.Random(seed)
    layers, workers = draw.randint(1, 12), draw.randint(2, 9)
    speeds = [draw.choice([1.0, 1.0, 0.7, 0.4, 0.2]) for _ in range(workers - 1)] + [1.0]
    works = [draw.choice([1.0, 2.0, 5.0]) for _ in range(layers)]
    held = [tuple(sorted({0, *draw.sample(range(layers), draw.randint(0, layers))})) for _ in range(workers)]
    found = fit_speeds(timed(speeds, works, held), layers)
    assert found.speeds == (pytest.approx(speeds, abs=0.002) if min(speeds) < 1 else ())
    seen = {layer for mine in held for layer in mine}
    each = found.layer_s or (1.0,) * layers
    for layer in seen:
        assert each[layer] * found.unit_s == pytest.approx(works[layer], rel=0.01)
