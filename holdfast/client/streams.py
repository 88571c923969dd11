"""CUDA as far as snapshots need it: a stream beside the one that computes, events, and memory both sides can reach."""

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch

from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.layout import BIG_BYTES, Layout

_CHUNK_BYTES = 256 << 20  # registered at once, so that copies can start before all of it is


class Streams:
    """One GPU. Work given to a stream is done later, in order; only `sync` waits for any of it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side: Any = torch.cuda.Stream(device)

    def compute(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def run(self, stream: Any, work: Callable[[], object]) -> None:
        with torch.cuda.stream(stream):
            work()

    def record(self, stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Let the stream, not the caller, wait."""
        stream.wait_event(event)

    def passed(self, event: Any) -> bool:
        return bool(event.query())

    def sync(self, event: Any) -> None:
        event.synchronize()

    def between_s(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1000

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def host(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def room(self) -> int:
        """Bytes of the GPU that are free."""
        return int(torch.cuda.mem_get_info(self.device)[0])


class Registered:
    """Makes an arena reachable for the GPU in a thread; a copy waits for its own part only."""

    def __init__(self, arena: Arena, layout: Layout, device: torch.device, say: Callable[[str], None]) -> None:
        self._device = device
        self._base = torch.frombuffer(arena.memory, dtype=torch.uint8).data_ptr()
        self._news = threading.Condition()
        self._done: dict[int, int] = dict.fromkeys(range(arena.slots), 0)  # how far into its image each slot is
        self._made: list[int] = []
        newest = [sealed.slot for sealed in arena.sealed()]
        order = sorted(range(arena.slots), key=lambda slot: newest.index(slot) if slot in newest else len(newest))
        parts = [(slot, *part) for slot in order for part in _parts(arena, layout, slot)]
        self._thread = threading.Thread(target=self._register, args=(parts, say), name="holdfast-register", daemon=True)
        self._thread.start()

    def wait(self, slot: int, end: int) -> None:
        """Until the image of a slot is reachable up to here."""
        with self._news:
            self._news.wait_for(lambda: self._done[slot] >= end)

    def close(self) -> None:
        """Nothing may be copied any more."""
        self._thread.join()
        for address in self._made:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._made.clear()

    def _register(self, parts: list[tuple[int, int, int, int]], say: Callable[[str], None]) -> None:
        torch.cuda.set_device(self._device)  # of this thread: another GPU is none of its business
        failed = 0
        for slot, start, end, reached in parts:
            failed = failed or int(torch.cuda.cudart().cudaHostRegister(self._base + start, end - start, 0))
            if not failed:
                self._made.append(self._base + start)
            with self._news:
                self._done[slot] = reached
                self._news.notify_all()
        if failed:
            say(f"memory cannot be registered with the GPU (CUDA error {failed}): snapshots will hold training up")


def _parts(arena: Arena, layout: Layout, slot: int) -> Iterator[tuple[int, int, int]]:
    """Where a slot is cut: at large records, which start on a page, so that no copy crosses a cut."""
    first = arena.image_at(slot)
    cuts = [arena.head_at(slot)]
    for item in layout.items:
        if item.spec.bytes >= BIG_BYTES and first + item.offset - cuts[-1] >= _CHUNK_BYTES:
            cuts.append(first + item.offset)
    cuts.append(first + -(-layout.image_bytes // 4096) * 4096)
    for start, end in pairwise(cuts):
        yield start, end, end - first
