"""The global batch: the same samples at every world size, each once in an epoch."""

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


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="cannot be cut into microbatches of 3"):
        GlobalBatch(samples=10, size=8, microbatch=3)
    with pytest.raises(ValueError, match="at least 1"):
        GlobalBatch(samples=0, size=8, microbatch=2)
    batch = GlobalBatch(samples=10, size=8, microbatch=2)
    with pytest.raises(ValueError, match="4 microbatches cannot be divided among 5 ranks"):
        batch.divide(1, Here(rank=0, world=5, generation=1, step=0))
    with pytest.raises(ValueError, match="steps count from 1"):
        batch.divide(0, Here(rank=0, world=1, generation=1, step=0))
