"""Sends tensors between the workers of a pipeline over the default group.

Messages have no tags, because NCCL knows none: the messages from one worker to another come in the order in which both
post them. Over NCCL the messages of a worker also end in this order, and a send may end only when its receive has been
posted. So all workers post their messages in one common order (see core/elastic/task_order.py), or as one group.

NCCL and torch count the open groups of messages separately for each thread. If a message fails because its receiver has
died, torch leaves the group open, and the same thread can make no communicator any more that works. So messages over
NCCL are posted by a thread that ends with its generation.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast.client.snapshot.seal_fence import SealPass

_MOST_DIMENSIONS = 8
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MARK = 0x686F6C64  # the first number of what is sent before a tensor; nothing that an abort leaves behind has it

Outgoing = tuple[torch.Tensor, int]  # and to whom
Incoming = tuple[torch.Tensor, int]  # that is to be filled, and by whom
PostGroup = Callable[[Sequence[Outgoing], Sequence[Incoming]], list[Any]]


class GroupsBrokenError(dist.DistError):
    """Raised if a message or an exchange ended without its content, as happens when its group is aborted."""


class ComingTensor(NamedTuple):
    """A tensor that is being received."""

    into: torch.Tensor
    works: list[Any]

    def take(self) -> torch.Tensor:
        """Wait until the tensor is here; on a GPU, make the current stream wait."""
        for work in self.works:
            work.wait()
        if self.into.is_cuda:
            self.into.record_stream(torch.cuda.current_stream(self.into.device))  # it was made on another one
        return self.into


class RankTraffic:
    """Posts messages without waiting for them. Until `settle`, it keeps the tensors that are being sent."""

    def __init__(self, device: torch.device, post_group: PostGroup | None = None) -> None:
        self.device = device
        self._post_group = post_group or post_batch
        on_gpu = device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, "holdfast messages") if on_gpu else None
        self._aside = torch.cuda.Stream(device) if on_gpu else None
        self._sends: deque[tuple[list[Any], Sequence[Outgoing]]] = deque()

    def close(self) -> None:
        """End this traffic, which belongs to a generation that is over."""
        self._sends.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def post(self, sends: Sequence[Outgoing], receives: Sequence[Incoming]) -> list[Any]:
        """Post these messages as one group, in which none waits for another. Return what to wait for before the
        received tensors are used."""
        if not sends and not receives:
            return []
        works = self._call(partial(self._post_group, sends, receives))
        each = len(works) == len(sends) + len(receives)  # else one work is for the whole group
        while self._sends and all(work.is_completed() for work in self._sends[0][0]):
            self._sends.popleft()
        if sends:
            self._sends.append((works[: len(sends)] if each else works, sends))
        return works[len(sends) :] if each else works

    def receive(self, into: torch.Tensor, source: int, sends: Sequence[Outgoing] = ()) -> torch.Tensor:
        """Receive a tensor, and post these sends in the same group."""
        return ComingTensor(into, self.post(sends, [(into, source)])).take()

    def settle(self) -> None:
        """Wait until all sends are complete."""
        for works, _ in self._sends:
            for work in works:
                work.wait()
        self._sends.clear()

    def await_device(self) -> None:
        """Wait until the device has ended all that was queued, messages included."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def send_shaped(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to a worker that does not know its shape, by two messages."""
        if tensor.dim() > _MOST_DIMENSIONS or tensor.dtype not in _DTYPES:
            raise TypeError(f"a layer returned a tensor of {tensor.dtype} and {tensor.dim()} dimensions")
        shape = [MARK, _DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        told = torch.tensor(shape + [0] * (_MOST_DIMENSIONS + 3 - len(shape)), device=self.device)
        self.post([(told, to)], [])
        self.post([(tensor, to)], [])

    def start_shaped(self, source: int) -> ComingTensor:
        """Wait for the shape of a tensor, and start to receive it. On a GPU, what is queued goes on meanwhile."""
        with self._beside():
            told = torch.zeros(_MOST_DIMENSIONS + 3, dtype=torch.int64, device=self.device)
            mark, dtype, dimensions, *shape = self.receive(told, source).tolist()
            if mark != MARK:
                raise GroupsBrokenError(f"a message of rank {source} ended without its content")
            into = torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=self.device)
            return ComingTensor(into, self.post([], [(into, source)]))

    def _call(self, function: Callable[[], list[Any]]) -> list[Any]:
        if self._thread is None:
            return function()
        return self._thread.submit(_call_on, torch.cuda.current_stream(self.device), function).result()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On a GPU, use another stream in this block, which does not wait for passes that are queued."""
        with torch.cuda.stream(self._aside) if self._aside is not None else nullcontext():
            yield


def require_open(seal: SealPass) -> None:
    """Raise GroupsBrokenError if groups were or are being aborted, so that what has just ended may have been cut off.
    `seal` is from before it began."""
    with seal.lock:
        if not seal.is_valid:
            raise GroupsBrokenError("the groups of this generation were aborted")


def post_batch(sends: Sequence[Outgoing], receives: Sequence[Incoming]) -> list[Any]:
    """Post messages of the default group."""
    ops = [dist.P2POp(dist.isend, tensor, to) for tensor, to in sends]
    ops += [dist.P2POp(dist.irecv, into, source) for into, source in receives]
    return list(dist.batch_isend_irecv(ops))


def _call_on(stream: Any, function: Callable[[], list[Any]]) -> list[Any]:
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        return function()
