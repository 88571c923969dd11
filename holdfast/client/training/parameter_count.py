"""Counts the parameters that a script's optimizers train, to estimate the FLOPs of a step.

The count must cover the whole model, or MFU would come out too small. So there is no count if an optimizer has flat
parameters of FSDP1 or master weights of mixed precision: they do not tell the size of the whole. A DTensor does. The
cost of frozen weights is unknown; a script that has some must report its FLOPs.
"""

import weakref
from typing import Any

from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

NOT_KNOWN = 0
_FLAT = ("_is_flat_param", "_fsdp_flattened")  # FSDP1's marks


class ParameterCount:
    """The parameters of all optimizers that have made a step, each counted once."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._sizes: dict[int, int] = {}  # by the parameter's id
        self._whole = True

    def add_optimizer(self, optimizer: Optimizer) -> int | None:
        """Return the count with this optimizer's parameters; None if the optimizer was counted before."""
        if optimizer in self._seen:
            return None
        self._seen.add(optimizer)
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            self._whole = self._whole and _is_whole(parameter)
            self._sizes[id(parameter)] = parameter.numel()
        return sum(self._sizes.values()) if self._whole else NOT_KNOWN


def _is_whole(parameter: Any) -> bool:
    """Return whether this parameter seems to have its full size, as in the whole model."""
    return isinstance(parameter, Parameter) and not any(hasattr(parameter, mark) for mark in _FLAT)
