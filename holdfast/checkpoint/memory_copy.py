"""Copies memory with as many threads as this rank has processors for.

One processor alone does not saturate the memory bus: for copies below some hundred megabytes the C library reads
every target line before it writes it. Two threads take little more than half the time of one.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

_CHUNK_BYTES = 4 << 20
_MOST_THREADS = 4  # more gain little, and training may want them
_PAGE_BYTES = mmap.PAGESIZE

_madvise = ctypes.CDLL(None).madvise  # of any memory, not only of what Python has mapped
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Move = tuple[int, int, int]  # to, from, bytes: addresses that both stay where they are until the copy is done


class MemoryCopier:
    """Copies memory for one rank with several threads, the calling thread among them."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or _spare_threads()
        self._pool = ThreadPoolExecutor(self.threads - 1, "holdfast-copy") if self.threads > 1 else None

    def copy_moves(self, moves: Iterable[Move]) -> None:
        """Make all copies; returns when they are done."""
        cut = [chunk for move in moves for chunk in _aligned_chunks(*move)]
        turns = count()

        def work() -> None:
            for turn in turns:
                if turn >= len(cut):
                    return
                ctypes.memmove(*cut[turn])  # without the interpreter's lock

        wanted = min(self.threads, len(cut)) - 1
        others = [self._pool.submit(work) for _ in range(wanted)] if self._pool else []
        work()
        for other in others:
            if not other.cancel():  # one that did not get a processor yet is not waited for
                other.result()


def prefer_large_pages(start: int, size: int) -> None:
    """Ask the kernel for large pages for untouched memory, so that the copies cause few page faults.

    This is only advice: without large pages the copies are slower, not wrong. Pages are not populated beforehand,
    because populating them took longer in measurements than the page faults do.
    """
    if size >= _CHUNK_BYTES:
        first = start // _PAGE_BYTES * _PAGE_BYTES
        _madvise(first, -(-(start + size) // _PAGE_BYTES) * _PAGE_BYTES - first, mmap.MADV_HUGEPAGE)


def _aligned_chunks(to: int, start: int, size: int) -> Iterator[Move]:
    """Cut a move at aligned target addresses, so that no two threads touch the same page."""
    at = 0
    while at < size:
        part = min(_CHUNK_BYTES - (to + at) % _CHUNK_BYTES, size - at)
        yield to + at, start + at, part
        at += part


def _spare_threads() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // max(1, ranks)))
