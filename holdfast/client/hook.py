"""Progress of scripts that import nothing: PyTorch's own hook tells of every optimizer step."""

import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from holdfast.client.progress import Progress


class Count:
    """Steps of the first optimizer in this generation; others (a discriminator's, say) do not count."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._first: weakref.ref[Optimizer] | None = None
        self._steps = 0

    def see(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        first = self._first() if self._first else None
        if first is None:
            self._first = weakref.ref(optimizer)
        elif first is not optimizer:
            return
        self._steps += 1
        self._progress.count(self._steps)


def install(progress: Progress) -> None:
    """Count from here on, until the script tells its steps itself.

    The hook is never taken out again: that might happen while PyTorch goes through its hooks. The compiler must not
    look into it: it would trace the count once and run it never.
    """
    register_optimizer_step_post_hook(torch.compiler.disable(Count(progress).see))
