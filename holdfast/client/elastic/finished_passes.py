"""What one worker has computed of a step: gradients by layer and microbatch, and losses. After a failure in this step
the part that is finished still counts, so its microbatches are not computed again.

Only over gloo: a message that breaks off fails there. Over NCCL an abort ends it like any other, and a peer may have
sent on what its own abort left behind; only the vote tells such a step from a good one.
"""

from collections.abc import Collection

import torch


class FinishedPasses:
    """The results of one worker's passes in one step."""

    def __init__(self, step: int = 0) -> None:
        self.step = step  # 0: none
        self.gradients: dict[tuple[int, int], torch.Tensor] = {}  # by layer and microbatch
        self.losses: dict[int, torch.Tensor] = {}  # by microbatch
        self._finished: set[tuple[int, int]] = set()

    def finish(self, layer: int, microbatch: int) -> None:
        """Note that a layer's backward pass is over, and that its gradient, if it has parameters, is here."""
        self._finished.add((layer, microbatch))

    def list_finished(self) -> tuple[tuple[int, int], ...]:
        """Return the finished backward passes, each by layer and microbatch."""
        return tuple(sorted(self._finished))

    def keep(self, microbatches: Collection[int]) -> "FinishedPasses":
        """Return what there is of these microbatches."""
        kept = FinishedPasses(self.step)
        kept.gradients = {key: one for key, one in self.gradients.items() if key in self._finished}
        kept.gradients = {(layer, m): one for (layer, m), one in kept.gradients.items() if m in microbatches}
        kept.losses = {m: loss for m, loss in self.losses.items() if m in microbatches}
        kept._finished = {(layer, m) for layer, m in self._finished if m in microbatches}
        return kept
