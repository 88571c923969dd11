"""Restores a snapshot from an arena's file to a GPU through small pinned buffers.

Mapping and registering gigabytes of small pages takes longer than reading them. Here several threads each read a piece
into a buffer and pass it to the GPU. This restores 8 GB in a third of the time. The arena is registered afterwards,
during the first step.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import torch

from holdfast.checkpoint.state_image import StateError, bytes_of
from holdfast.client.snapshot.cuda_graph_replays import GRAPH_WATCH
from holdfast.client.snapshot.cuda_streams import CudaStreams

PIECE_BYTES = 8 << 20
_BUFFERS = 2  # one is read into while the GPU takes the other
_MOST_THREADS = 12  # beyond that the bus to the GPU is full


class UploadPiece(NamedTuple):
    fd: int
    at: int
    into: torch.Tensor  # bytes on the GPU


class GpuUpload:
    """One restore to a GPU; its threads and buffers are set up at construction, while other preparations run."""

    def __init__(self, make: Callable[[], CudaStreams]) -> None:
        self._pieces: SimpleQueue[UploadPiece | None] = SimpleQueue()
        self._failed: list[Exception] = []
        self._asked = 0
        self._done: list[int] = []  # an entry for each piece that has arrived
        # Daemons: a script that ends without having restored anything must not wait for them.
        self._threads = [
            threading.Thread(target=self._run_thread, args=(make,), name="holdfast-fetch", daemon=True)
            for _ in range(max(1, min(_MOST_THREADS, _cpu_share())))
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def from_file(self, path: str, first: int) -> Iterator[Callable[[int, torch.Tensor], None]]:
        """Yield a function (offset, tensor) that queues a read from the image into the tensor. The image begins at byte
        `first` of the file. At the exit of the block, wait for all reads."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield lambda at, tensor: self._add_tensor(fd, first + at, tensor)
        finally:
            try:
                self.finish()
            finally:
                os.close(fd)

    def _add_tensor(self, fd: int, at: int, tensor: torch.Tensor) -> None:
        flat = tensor.detach().view(-1).view(torch.uint8) if tensor.dim() else tensor.detach().view(1).view(torch.uint8)
        for start in range(0, flat.nbytes, PIECE_BYTES):
            self._asked += 1
            self._pieces.put(UploadPiece(fd, at + start, flat[start : start + PIECE_BYTES]))

    def finish(self) -> None:
        """Wait for all uploads and raise the first failure; a second call does nothing more."""
        for _ in self._threads:
            self._pieces.put(None)
        while self._threads:
            self._threads.pop().join()
        if self._failed and self._asked:
            raise self._failed[0]
        if len(self._done) != self._asked:  # a thread has died of something else
            raise StateError(f"{self._asked - len(self._done)} pieces of the snapshot did not arrive")

    def _run_thread(self, make: Callable[[], CudaStreams]) -> None:
        try:
            self._upload_pieces(make)
        except (OSError, RuntimeError, StateError) as e:  # torch tells of all that CUDA cannot do as a RuntimeError
            self._failed.append(e)

    def _upload_pieces(self, make: Callable[[], CudaStreams]) -> None:
        with GRAPH_WATCH.between_captures():  # the script may capture graphs before it restores
            streams = make()
            streams.use_device()
            buffers = [streams.host_buffer(PIECE_BYTES) for _ in range(_BUFFERS)]
        views = [bytes_of(buffer) for buffer in buffers]
        taken: list[object] = [None] * _BUFFERS
        turn, arrived = 0, list[int]()
        while piece := self._pieces.get():
            if taken[turn] is not None:
                streams.sync(taken[turn])
            size = piece.into.nbytes
            _read_fully(piece.fd, views[turn][:size], piece.at)
            streams.run(streams.side, partial(piece.into.copy_, buffers[turn][:size], non_blocking=True))
            taken[turn] = streams.record_event(streams.side)
            arrived.append(piece.at)
            turn = (turn + 1) % _BUFFERS
        for event in taken:
            if event is not None:
                streams.sync(event)
        self._done += arrived


def _read_fully(fd: int, into: memoryview, at: int) -> None:
    while into:
        size = os.preadv(fd, [into], at)
        if not size:
            raise StateError("the snapshot is cut short")
        into, at = into[size:], at + size


def _cpu_share() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return len(os.sched_getaffinity(0)) // max(1, ranks)
