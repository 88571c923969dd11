"""The ranks of a job, and the collectives by which they agree before they save together."""

import os
from typing import TypeVar

import torch.distributed as dist

from holdfast.checkpoint.image_layout import ImageLayout, Ranks
from holdfast.checkpoint.state_image import StateError
from holdfast.client.checkpointing import pickle_free_collectives

T = TypeVar("T")
_MOST_LAYOUT_BYTES = 1 << 30


class RankWorld:
    """The ranks of one job. The methods that gather or broadcast are collectives, except in a world of one rank."""

    count = 0  # of these in this process so far

    def __init__(self) -> None:
        RankWorld.count += 1
        together = dist.is_available() and dist.is_initialized()
        told = int(os.environ.get("WORLD_SIZE", "1"))
        if not together and told > 1:
            raise StateError(f"this is one of {told} ranks: call init_process_group before making a Checkpointer")
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1
        self.nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))

    def replica_group(self, replicated: "bool | dist.ProcessGroup | None") -> Ranks:
        """Return the ranks that hold the same tensors as this rank, according to the script's argument `replicated`."""
        if replicated is None or replicated is False or self.size == 1:
            return (self.rank,)
        if replicated is True:
            return tuple(range(self.size))
        return tuple(sorted(dist.get_process_group_ranks(replicated)))

    def gather_layouts(self, layout: ImageLayout) -> list[ImageLayout] | None:
        """Return every rank's layout on rank 0; None on the others."""
        if self.size == 1:
            return [layout]
        return pickle_free_collectives.gather_to_first(layout, ImageLayout, most=_MOST_LAYOUT_BYTES)

    def largest_of(self, number: int) -> int:
        return max(self.gather_all(number, int))

    def gather_all(self, thing: T, kind: type[T]) -> list[T]:
        """Return the value of every rank, in rank order."""
        return [thing] if self.size == 1 else pickle_free_collectives.gather_values(thing, kind)

    def broadcast_first(self, thing: T, kind: type[T]) -> T:
        """Return the value of rank 0."""
        return thing if self.size == 1 else pickle_free_collectives.broadcast_value(thing, kind)
