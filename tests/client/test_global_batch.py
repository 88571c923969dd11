"""The global batch: the same samples at every world size, each once in an epoch."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.client.survival.global_batch import GlobalBatch, Microbatch
from holdfast.client.survival.survivor import Here


def divide(batch: GlobalBatch, step: int, world: int) -> list[list[Microbatch]]:
    return [batch.divide(step, Here(rank=rank, world=world, generation=1, step=0)) for rank in range(world)]


@settings(deadline=None)
@given(
    samples=st.integers(1, 50),
    count=st.integers(1, 6),
    microbatch=st.integers(1, 4),
    worlds=st.data(),
    seed=st.integers(),
)
def test_who_computes_what_is_all_that_depends_on_the_world(
    samples: int, count: int, microbatch: int, worlds: st.DataObject, seed: int
) -> None:
    batch, other = (
        GlobalBatch(samples=samples, size=count * microbatch, microbatch=microbatch, seed=seed) for _ in range(2)
    )
    seen: list[int] = []
    for step in range(1, 8):
        parts = divide(batch, step, worlds.draw(st.integers(1, count)))
        flat = sorted(part._replace(weight=0.0, last=False) for rank in parts for part in rank)
        [alone] = divide(other, step, 1)
        assert flat == [part._replace(weight=0.0, last=False) for part in alone]
        assert all([part.last for part in rank] == [False] * (len(rank) - 1) + [True] for rank in parts)
        assert sum(part.weight for rank in parts for part in rank) == pytest.approx(len(parts)), "the mean of all ranks"
        seen += [sample for part in flat for sample in part.samples]
    for first in range(0, len(seen) - samples + 1, samples):
        assert sorted(seen[first : first + samples]) == list(range(samples)), "an epoch has each once"


@pytest.mark.parametrize(
    ("given", "step", "world", "why"),
    [
        ((10, 8, 3), 1, 1, "a batch of 8 samples cannot be cut into microbatches of 3"),
        ((0, 8, 2), 1, 1, "samples, size and microbatch must be at least 1"),
        ((10, 8, 2), 1, 5, "4 microbatches cannot be divided among 5 ranks; make them smaller"),
        ((10, 8, 2), 0, 1, "steps count from 1, and this is 0"),
    ],
)
def test_what_it_refuses(given: tuple[int, int, int], step: int, world: int, why: str) -> None:
    samples, size, microbatch = given
    with pytest.raises(ValueError, match=f"^{re.escape(why)}$"):
        divide(GlobalBatch(samples=samples, size=size, microbatch=microbatch), step, world)
