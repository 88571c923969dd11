"""Divides the global batch of each step among the ranks, so that the samples are the same at every world size."""

from hashlib import blake2b
from typing import NamedTuple

import torch

from holdfast.client.survival.survivor import Here


class Microbatch(NamedTuple):
    """One microbatch of a step, for the rank that computes it.

    >>> holdfast.Microbatch(number=3, samples=[7, 1], seed=5, weight=0.5, last=True).samples
    [7, 1]
    """

    number: int  # within the step, from 0 on
    samples: list[int]
    seed: int  # of what it draws: from the step and the number, so it is the same on whichever rank
    weight: float  # of its mean loss, if gradients are averaged over all ranks, as DDP does
    last: bool  # of this rank's in the step: its backward pass is the one that sums gradients


class GlobalBatch:
    """Decides which samples are in which step, and which rank computes them. Steps count from 1 and run through the
    epochs. Each epoch has every sample exactly once, in a new order. An epoch may end in the middle of a batch. The
    number of ranks changes only which rank computes what.

    >>> batch = holdfast.GlobalBatch(samples=100, size=8, microbatch=2)
    >>> [part.number for part in batch.divide(1, holdfast.Here(rank=0, world=3, generation=1, step=0))]
    [0, 3]
    """

    def __init__(self, *, samples: int, size: int, microbatch: int, seed: int = 0) -> None:
        """`samples` is the number of samples in the dataset, `size` in a step's batch, `microbatch` in a microbatch."""
        if min(samples, size, microbatch) < 1:
            raise ValueError("samples, size and microbatch must be at least 1")
        if size % microbatch:
            raise ValueError(f"a batch of {size} samples cannot be cut into microbatches of {microbatch}")
        self.samples, self.size, self.microbatch, self.seed = samples, size, microbatch, seed
        self._order: tuple[int, torch.Tensor] = (-1, torch.empty(0))  # of the epoch that was asked for last

    def divide(self, step: int, here: Here) -> list[Microbatch]:
        """Return the microbatches of a step that this rank computes; each rank has at least one.

        >>> batch = holdfast.GlobalBatch(samples=6, size=2, microbatch=1)
        >>> alone = holdfast.Here(rank=0, world=1, generation=1, step=0)
        >>> sorted(number for step in (1, 2, 3) for part in batch.divide(step, alone) for number in part.samples)
        [0, 1, 2, 3, 4, 5]
        """
        count = self.size // self.microbatch
        if step < 1 or here.world > count:
            raise ValueError(
                f"{count} microbatches cannot be divided among {here.world} ranks; make them smaller"
                if step >= 1
                else f"steps count from 1, and this is {step}"
            )
        numbers = range(here.rank, count, here.world)
        return [self._make_one(step, number, here.world, last=number == numbers[-1]) for number in numbers]

    def _make_one(self, step: int, number: int, world: int, *, last: bool) -> Microbatch:
        first = (step - 1) * self.size + number * self.microbatch
        return Microbatch(
            number=number,
            samples=[self._find_sample(at) for at in range(first, first + self.microbatch)],
            seed=_draw_seed(self.seed, step, number),
            weight=world * self.microbatch / self.size,
            last=last,
        )

    def _find_sample(self, at: int) -> int:
        epoch, place = divmod(at, self.samples)
        if self._order[0] != epoch:
            chance = torch.Generator().manual_seed(_draw_seed(self.seed, epoch))
            self._order = epoch, torch.randperm(self.samples, generator=chance)
        return int(self._order[1][place])


def _draw_seed(*of: int) -> int:
    return int.from_bytes(blake2b(repr(of).encode(), digest_size=8).digest(), "big") >> 1
