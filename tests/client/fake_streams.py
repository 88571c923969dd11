"""Streams that do their work in any order that events allow, one small piece at a time."""

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class FakeEvent:
    def __init__(self) -> None:
        self.done = False


class FakeStream:
    def __init__(self) -> None:
        self.queue: deque[FakeEvent | Callable[[], object] | tuple[FakeEvent]] = deque()  # a tuple: wait for it


class FakeStreams:
    """As holdfast.client.snapshot.cuda_streams.CudaStreams; nothing happens before `pump` or `sync`."""

    def __init__(self, seed: int) -> None:
        self.device = torch.device("cpu")
        self.side, self.main = FakeStream(), FakeStream()
        self.chance = random.Random(seed)
        self.looks: Callable[[], None] = lambda: None  # after every piece of work
        self.took_s, self.had_s = 0.0, 1.0
        self.capturing = False
        self.synced = 0
        self._lock = threading.RLock()

    def use_device(self) -> None:
        pass

    def compute_stream(self) -> FakeStream:
        return self.main

    def run(self, stream: FakeStream, work: Callable[[], object]) -> None:
        with _Captured(lambda piece: self._add(stream, piece)):
            work()

    def record_event(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent()
        self._add(stream, event)
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self._add(stream, (event,))

    def is_passed(self, event: FakeEvent) -> bool:
        return event.done

    def sync(self, event: FakeEvent) -> None:
        self.synced += not event.done
        while not event.done:
            assert self.pump(), "it waits for itself"

    def between_s(self, first: FakeEvent, last: FakeEvent) -> float:
        return self.had_s if last in self.reached else self.took_s

    reached: list[FakeEvent] = []

    def is_capturing(self) -> bool:
        return self.capturing

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def free_bytes(self) -> int:
        return 1 << 40

    def pump(self, pieces: int = 1) -> bool:
        """Do some work; False if there is none that can be done."""
        for _ in range(pieces):
            with self._lock:
                able = [stream for stream in (self.side, self.main) if self._can(stream)]
                if not able:
                    return False
                piece = self.chance.choice(able).queue.popleft()
            if isinstance(piece, FakeEvent):
                piece.done = True
            elif not isinstance(piece, tuple):
                piece()
                self.looks()
        return True

    def _add(self, stream: FakeStream, piece: Any) -> None:
        with self._lock:
            stream.queue.append(piece)

    @staticmethod
    def _can(stream: FakeStream) -> bool:
        if not stream.queue:
            return False
        first = stream.queue[0]
        return not isinstance(first, tuple) or first[0].done


class _Captured(TorchFunctionMode):
    """Copies are kept for later, each by itself, and large ones in halves: a GPU may be in the middle of one."""

    def __init__(self, keep: Callable[[Callable[[], object]], None]) -> None:
        super().__init__()
        self._keep = keep

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            self._later(args[0], args[1])
            return args[0]
        if func is torch._foreach_copy_:
            for target, source in zip(args[0], args[1], strict=True):
                self._later(target, source)
            return None
        return func(*args, **(kwargs or {}))

    def _later(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        if target.dim() and len(target) > 1 and target.nbytes > 8:
            half = len(target) // 2
            self._keep(lambda: target[:half].copy_(source[:half]))
            self._keep(lambda: target[half:].copy_(source[half:]))
        else:
            self._keep(lambda: target.copy_(source))
