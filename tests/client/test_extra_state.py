"""Generators: what is told of them is what they are, however little of it was looked at."""

import random
from collections.abc import Callable
from typing import Any, cast

import numpy
import pytest
import torch

from holdfast.client.checkpointing.extra_state import _numpy_state, read_generators, set_generators

DRAWS: list[Callable[[], object]] = [
    lambda: None,
    lambda: numpy.random.rand(),
    lambda: numpy.random.randn(),
    lambda: numpy.random.randn(2),
    lambda: numpy.random.randint(10),
    lambda: numpy.random.seed(7),
    lambda: numpy.random.shuffle(numpy.arange(700)),
]


@pytest.fixture(autouse=True)
def _as_they_were() -> object:
    before = read_generators()
    yield
    set_generators(before)


@pytest.mark.parametrize("seed", range(5))
def test_numpy_is_told_as_it_is(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(200):
        chance.choice(DRAWS)()
        kind, key, *rest = cast(tuple[Any, ...], numpy.random.get_state())
        assert _numpy_state(numpy) == (kind, key.tobytes(), *rest)


def test_all_go_on_as_they_would_have() -> None:
    random.gauss(0, 1)
    numpy.random.randn()
    before = read_generators()
    drawn = (random.gauss(0, 1), random.random(), numpy.random.randn(), numpy.random.rand(), torch.rand(2).tolist())
    set_generators(before)
    again = (random.gauss(0, 1), random.random(), numpy.random.randn(), numpy.random.rand(), torch.rand(2).tolist())
    assert again == drawn
