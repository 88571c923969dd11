"""The streams and events that snapshots and restores use on one GPU."""

from collections.abc import Callable
from typing import Any

import torch


class CudaStreams:
    """The streams of one GPU. Work on a stream runs later, in order; only `sync` blocks the caller."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side: Any = torch.cuda.Stream(device)
        self._index: int | None = device.index  # which is looked up faster

    def use_device(self) -> None:
        """Select this GPU for the calling thread; otherwise CUDA would create a context on another GPU."""
        torch.cuda.set_device(self.device)

    def compute_stream(self) -> Any:
        return torch.cuda.current_stream(self._index)

    def run(self, stream: Any, work: Callable[[], object]) -> None:
        with torch.cuda.stream(stream):
            work()

    def record_event(self, stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Make the stream, not the caller, wait for the event."""
        stream.wait_event(event)

    def is_passed(self, event: Any) -> bool:
        return bool(event.query())

    def sync(self, event: Any) -> None:
        event.synchronize()

    def between_s(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1000

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def free_bytes(self) -> int:
        """Return the free memory of the GPU in bytes."""
        return int(torch.cuda.mem_get_info(self.device)[0])
