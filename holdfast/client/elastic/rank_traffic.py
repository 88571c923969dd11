"""Sends tensors between the workers of a pipeline over the default group; tags tell the tensors apart."""

from typing import Any

import torch
import torch.distributed as dist

_MOST_DIMENSIONS = 8
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class RankTraffic:
    """Sends without waiting, so workers cannot block one another if all follow the same order of passes. Until
    `settle`, it keeps the tensors that are being sent."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sends: list[tuple[Any, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        self._sends.append((dist.isend(tensor, to, tag=tag), tensor))

    def receive(self, into: torch.Tensor, source: int, tag: int) -> torch.Tensor:
        dist.recv(into, source, tag=tag)
        return into

    def start_receive(self, into: torch.Tensor, source: int, tag: int) -> Any:
        return dist.irecv(into, source, tag=tag)

    def send_shaped(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Send a tensor to a worker that does not know its shape. Uses two tags: `tag` and the next one."""
        if tensor.dim() > _MOST_DIMENSIONS or tensor.dtype not in _DTYPES:
            raise TypeError(f"a layer returned a tensor of {tensor.dtype} and {tensor.dim()} dimensions")
        shape = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        told = torch.tensor(shape + [0] * (_MOST_DIMENSIONS + 2 - len(shape)), device=self.device)
        self.send(told, to, tag)
        self.send(tensor, to, tag + 1)

    def receive_shaped(self, source: int, tag: int) -> torch.Tensor:
        told = torch.zeros(_MOST_DIMENSIONS + 2, dtype=torch.int64, device=self.device)
        dtype, dimensions, *shape = self.receive(told, source, tag).tolist()
        into = torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=self.device)
        return self.receive(into, source, tag + 1)

    def settle(self) -> None:
        """Wait until all sends are complete."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()
