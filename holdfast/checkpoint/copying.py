"""Copies of memory, by as many threads as this rank has processors for.

One processor alone does not fill the memory bus: below some hundred megabytes the C library's copy reads every line of
the target before it writes it, and two threads then take little more than half the time of one.
"""

import ctypes
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count

_CHUNK_BYTES = 4 << 20
_MOST_THREADS = 4  # more gain little, and training may want them

Move = tuple[int, int, int]  # to, from, bytes: addresses that both stay where they are until the copy is done


class Copier:
    """Copies of one rank; the caller does its part of each."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or _spare_threads()
        self._pool = ThreadPoolExecutor(self.threads - 1, "holdfast-copy") if self.threads > 1 else None

    def run(self, moves: Iterable[Move]) -> None:
        """When this returns, all is copied."""
        cut = [chunk for move in moves for chunk in _chunks(*move)]
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


def _chunks(to: int, start: int, size: int) -> Iterable[Move]:
    if size <= _CHUNK_BYTES:
        return ((to, start, size),)
    return ((to + at, start + at, min(_CHUNK_BYTES, size - at)) for at in range(0, size, _CHUNK_BYTES))


def _spare_threads() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // max(1, ranks)))
