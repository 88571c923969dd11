"""Reads a checkpoint with all ranks of the job together. Among ranks that need the same blocks, one rank reads each
block and sends it to the others; meanwhile it reads its next blocks.

If each of N replicas read everything, the load on the storage would be N times as high, and a large job would wait.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from hashlib import blake2b
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast.checkpoint.checkpoint_reader import find_parts, read_ranges
from holdfast.checkpoint.direct_io import spare_block
from holdfast.checkpoint.manifest import checksum_block
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.storage_opener import is_remote
from holdfast.checkpoint.verified_block_reads import PartPiece, PartReader, block_bytes, check_block, cut_blocks
from holdfast.client.checkpointing.rank_collectives import RankWorld

BlockPlace = tuple[int, int]  # the rank whose part it is in, and its number there
_AHEAD = 4  # blocks that are being read, and those that are being sent
_GARBLED = "a block came damaged from rank"


def read_restored(world: RankWorld, url: str, pieces: Sequence[PartPiece], into: memoryview, why: str = "") -> None:
    """Read into memory what this rank needs of a checkpoint; a collective. If any rank cannot read, every rank raises
    StorageError with the same sentence. If this rank has already failed, `why` is the reason.

    Ranks share blocks if sending is faster than reading: over NCCL, or if the storage is remote. On one host, two ranks
    took 3.4 times as long to share blocks over gloo as to read them separately from a local disk.
    """
    shares = world.size > 1 and ("nccl" in str(dist.get_backend()) or is_remote(url))
    if shares:
        read_together(world, url, pieces, into, why)
        return
    try:
        if not why:
            read_ranges(url, pieces, into)
    except StorageError as e:
        why = str(e)
    if reasons := [failed for failed in world.gather_all(why, str) if failed]:
        raise StorageError(reasons[0])


def read_together(world: RankWorld, url: str, pieces: Sequence[PartPiece], into: memoryview, why: str = "") -> None:
    """Do what `read_restored` does, but let ranks that need the same blocks always read each block once for all."""
    read: SharedRead | None = None
    try:
        read = None if why else SharedRead(url, pieces, into)
    except StorageError as e:
        why = str(e)
    told = world.gather_all((why, read.sign_blocks() if read else b""), tuple[str, bytes])
    if read and not any(failed for failed, _ in told):
        alike = tuple(rank for rank, (_, sign) in enumerate(told) if sign == told[world.rank][1])
        try:
            read.exchange_blocks(world, alike) if len(alike) > 1 else read_ranges(url, pieces, into)
        except StorageError as e:
            why = str(e)
        told = world.gather_all((why, b""), tuple[str, bytes])
    if reasons := [failed for failed, _ in told if failed]:
        raise StorageError(min(reasons, key=lambda reason: reason.startswith(_GARBLED)))


class _SentBlock(NamedTuple):
    """A block that is being sent; `error` says why this rank could not read it, "" if it could."""

    place: BlockPlace
    source: int
    content: torch.Tensor
    works: list[Any]
    error: str


class SharedRead:
    """The blocks of a checkpoint that this rank needs. Its methods raise StorageError."""

    def __init__(self, url: str, pieces: Sequence[PartPiece], into: memoryview) -> None:
        self._into = into
        self._storage, self._parts = find_parts(url, pieces)
        self._cuts = cut_blocks(pieces, self._parts, len(into))
        self._blocks = sorted(self._cuts)

    def sign_blocks(self) -> bytes:
        """Return a hash of the list of blocks; it is equal on ranks that need the same ones."""
        return blake2b(repr(self._blocks).encode(), digest_size=16).digest()

    def exchange_blocks(self, world: RankWorld, alike: tuple[int, ...]) -> None:
        """Read each block once among the ranks `alike`, which need the same blocks. If a block is bad, raise
        StorageError, but only after all blocks were sent: the other ranks wait for them."""
        wrong: list[str] = []
        under_way: deque[_SentBlock] = deque()
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(_AHEAD))
            readers: SimpleQueue[PartReader] = SimpleQueue()
            for _ in range(_AHEAD):
                readers.put(stack.enter_context(closing(PartReader(self._storage))))
            mine = self._read_ahead(pool, readers, self._blocks[alike.index(world.rank) :: len(alike)])
            for turn, place in enumerate(self._blocks):
                source = alike[turn % len(alike)]
                size = block_bytes(self._parts[place[0]], place[1])
                content, error = next(mine) if source == world.rank else (torch.empty(size, dtype=torch.uint8), "")
                content = content.to(_find_device())
                works = _send_block(content, source, alike, everyone=len(alike) == world.size)
                under_way.append(_SentBlock(place, source, content, works, error))
                if len(under_way) == _AHEAD:
                    wrong += self._take_block(under_way.popleft(), world.rank)
            while under_way:
                wrong += self._take_block(under_way.popleft(), world.rank)
        if wrong:
            raise StorageError(wrong[0])

    def _read_ahead(
        self, pool: ThreadPoolExecutor, readers: "SimpleQueue[PartReader]", places: Sequence[BlockPlace]
    ) -> Iterator[tuple[torch.Tensor, str]]:
        """Yield each block's content and an error, "" if it was read. Threads read the next blocks meanwhile."""
        reading: deque[Future[tuple[torch.Tensor, str]]] = deque()
        for place in places:
            if len(reading) == _AHEAD:
                yield reading.popleft().result()
            reading.append(pool.submit(self._read_block, readers, place))
        for one in reading:
            yield one.result()

    def _read_block(self, readers: "SimpleQueue[PartReader]", place: BlockPlace) -> tuple[torch.Tensor, str]:
        part, reader, target = self._parts[place[0]], readers.get(), spare_block()
        target = target[: block_bytes(part, place[1])]
        try:
            error = check_block(reader, part, place[1], target, spare_block())
        except StorageError as e:
            error = str(e)
        finally:
            readers.put(reader)
        return torch.frombuffer(target, dtype=torch.uint8), error

    def _take_block(self, sent: _SentBlock, rank: int) -> list[str]:
        """Wait until a block has arrived, and copy what this rank needs of it. Return a list of faults."""
        for work in sent.works:
            work.wait()
        if sent.error:
            return [sent.error]
        part, block = sent.place
        content = memoryview(sent.content.cpu().numpy().data)
        if sent.source != rank and checksum_block(content) != self._parts[part].block_checksum(block):
            return [f"{_GARBLED} {sent.source}: block {block} of {self._parts[part].file}"]
        for cut in self._cuts[sent.place]:
            self._into[cut.to : cut.to + cut.bytes] = content[cut.start : cut.start + cut.bytes]
        return []


def _find_device() -> torch.device:
    """Return the device whose memory the job's process group sends."""
    return (
        torch.device("cpu") if "gloo" in str(dist.get_backend()) else torch.device("cuda", torch.cuda.current_device())
    )


def _send_block(content: torch.Tensor, source: int, alike: tuple[int, ...], *, everyone: bool) -> list[Any]:
    """Begin to send a block from rank `source` to all ranks or, without `everyone`, to the ranks `alike`. Other ranks
    begin to receive it. Return the operations to wait for."""
    if everyone:
        return [dist.broadcast(content, src=source, async_op=True)]
    if dist.get_rank() != source:
        return list(dist.batch_isend_irecv([dist.P2POp(dist.irecv, content, source)]))
    return list(dist.batch_isend_irecv([dist.P2POp(dist.isend, content, one) for one in alike if one != source]))
