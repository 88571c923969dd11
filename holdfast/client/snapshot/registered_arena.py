"""The memory of an arena, registered with the GPU so that copies need no processor."""

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise, zip_longest

import torch

from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.image_layout import BIG_BYTES, ImageLayout
from holdfast.client.snapshot.cuda_graph_replays import GRAPH_WATCH

_CHUNK_BYTES = 64 << 20  # registered at once: copies start before all of it is, and calls of training wait for no more
_TOUCH_BYTES = 32 << 20  # touched at once, by each of a few threads
_MOST_THREADS = 8
_FIRST_STEP_S = 2.0  # the driver serves one call at a time: a step launched beside registering takes four times as long
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python 3.11 has no name for

_madvise = ctypes.CDLL(None).madvise  # without the interpreter's lock
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_Part = tuple[int, int, int, int]  # slot; start and end in the arena; how far into the slot's image that is


def thread_count() -> int:
    """Return the number of threads to use: this rank's share of the host's processors, up to a maximum."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // max(1, ranks)))


class RegisteredArena:
    """Registers an arena with the GPU in a thread, bit by bit; a copy waits only for the memory that it needs."""

    def __init__(self, arena: Arena, layout: ImageLayout, device: torch.device, say: Callable[[str], None]) -> None:
        self._device = device
        memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
        self._base, self._bytes = memory.data_ptr(), memory.nbytes
        self._news = threading.Condition()
        self._done: dict[int, int] = dict.fromkeys(range(arena.slots), 0)  # how far into its image each slot is
        self._made: list[int] = []
        # CUDA fails in strange places once registered memory is gone: whoever lets go of this lets go of it in order.
        self._end = weakref.finalize(self, _unregister_parts, device, memory, self._made)
        self._end.atexit = False
        newest = [sealed.slot for sealed in arena.list_sealed()]  # and what is newest is written last
        order = sorted(range(arena.slots), key=lambda slot: -newest.index(slot) if slot in newest else -arena.slots)
        parts = [(slot, *part) for slot in order for part in _cut_slot(arena, layout, slot)]
        self._thread = threading.Thread(
            target=self._register_parts, args=(parts, say), name="holdfast-register", daemon=True
        )
        self._is_begun = False
        self._due = threading.Event()

    def start_registering(self) -> None:
        """Start registering, once."""
        self._due.set()
        self._start_thread()

    def register_later(self) -> None:
        """Start registering once the first step has had time to be launched, or when `start_registering` is called. Use
        this after a restore, which registering would slow down threefold."""
        self._start_thread()

    def _start_thread(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._thread.start()

    def wait_reachable(self, slot: int, end: int) -> None:
        """Wait until the GPU can reach the image of a slot up to this byte."""
        self.start_registering()
        with self._news:
            self._news.wait_for(lambda: self._done[slot] >= end)

    def close(self) -> None:
        """Unregister the arena. Call this when no copy is running, and start none afterwards."""
        self._due.set()
        if self._is_begun:
            self._thread.join()
        self._end()

    def _register_parts(self, parts: list[_Part], say: Callable[[str], None]) -> None:
        self._due.wait(_FIRST_STEP_S)
        torch.cuda.set_device(self._device)  # of this thread: another GPU is none of its business
        failed = 0
        _madvise(self._base, self._bytes, mmap.MADV_HUGEPAGE)
        with ThreadPoolExecutor(thread_count(), "holdfast-touch") as pool:
            for slot, start, end, reached in _populated_parts(pool, self._base, parts):
                with GRAPH_WATCH.between_captures():
                    failed = failed or int(torch.cuda.cudart().cudaHostRegister(self._base + start, end - start, 0))
                if not failed:
                    self._made.append(self._base + start)
                with self._news:
                    self._done[slot] = reached
                    self._news.notify_all()
        if failed:
            say(f"memory cannot be registered with the GPU (CUDA error {failed}): snapshots will delay training")


def _unregister_parts(device: torch.device, memory: torch.Tensor, made: list[int]) -> None:
    """Unregister an arena from the GPU; the argument `memory` keeps the arena alive until then."""
    torch.cuda.synchronize(device)  # nothing may be on its way there any more
    for address in made:
        torch.cuda.cudart().cudaHostUnregister(address)


def _populated_parts(pool: ThreadPoolExecutor, base: int, parts: Sequence[_Part]) -> Iterator[_Part]:
    """Yield each part once its pages are populated; threads populate the next one meanwhile."""
    ahead: list[Future[None]] = []
    for part, following in zip_longest(parts, parts[1:]):
        under_way, ahead = (
            ahead or _populate_part(pool, base, part),
            _populate_part(pool, base, following) if following else [],
        )
        for one in under_way:
            one.result()
        yield part


def _populate_part(pool: ThreadPoolExecutor, base: int, part: _Part) -> list[Future[None]]:
    _, start, end, _ = part
    cut = [(base + at, min(_TOUCH_BYTES, end - at)) for at in range(start, end, _TOUCH_BYTES)]
    try:
        return [pool.submit(_populate_pages, *piece) for piece in cut]
    except RuntimeError:
        return []  # the interpreter ends: nobody will miss them


def _populate_pages(start: int, size: int) -> None:
    """Populate these pages now. An old kernel cannot do this; there, the first access populates each page."""
    _madvise(start, size, _POPULATE_WRITE)


def _cut_slot(arena: Arena, layout: ImageLayout, slot: int) -> Iterator[tuple[int, int, int]]:
    """Cut a slot into parts to be registered. Cuts are at starts of large items, so no copy crosses a cut."""
    first = arena.image_at(slot)
    cuts = [arena.head_at(slot)]
    for item in layout.items:
        if item.spec.bytes >= BIG_BYTES and first + item.offset - cuts[-1] >= _CHUNK_BYTES:
            cuts.append(first + item.offset)
    cuts.append(first + -(-layout.image_bytes // 4096) * 4096)
    for start, end in pairwise(cuts):
        yield start, end, end - first
