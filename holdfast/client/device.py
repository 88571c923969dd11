"""Losses that lie on an accelerator: fetched without ever waiting for it."""

from collections import deque
from typing import NamedTuple

import torch

from holdfast.wire.record import Slot

_AT_ONCE = 4  # a script that runs further ahead of its device than this loses values, never time


class Copy(NamedTuple):
    step: int
    values: torch.Tensor  # loss and grad_norm, in pinned memory
    has: tuple[bool, bool]
    done: torch.cuda.Event


class Copies:
    """Values on their way to the host."""

    def __init__(self) -> None:
        self._free = [torch.empty(2, dtype=torch.float64, pin_memory=True) for _ in range(_AT_ONCE)]
        self._under_way: deque[Copy] = deque()

    def start(self, step: int, loss: object, grad_norm: object) -> None:
        """Fetch these values behind the work that makes them."""
        if not self._free or torch.cuda.is_current_stream_capturing():
            return
        values = self._free.pop()
        has = _fetch(loss, values[0]), _fetch(grad_norm, values[1])
        done = torch.cuda.Event()
        done.record()
        self._under_way.append(Copy(step, values, has, done))

    def collect(self, slot: Slot) -> None:
        """Note what has arrived."""
        while self._under_way and self._under_way[0].done.query():
            copy = self._under_way.popleft()
            loss, grad_norm = copy.values.tolist()
            slot.note(copy.step, loss if copy.has[0] else None, grad_norm if copy.has[1] else None)
            self._free.append(copy.values)


def _fetch(value: object, into: torch.Tensor) -> bool:
    if isinstance(value, torch.Tensor) and not hasattr(value, "device_mesh"):
        into.copy_(value.detach().reshape(()), non_blocking=True)
    elif isinstance(value, int | float):
        into.fill_(value)
    else:
        return False
    return True
