"""Reads the parts of a checkpoint block by block: verifies each block and copies the wanted bytes out of it."""

from collections.abc import Sequence

import msgspec

from holdfast.checkpoint.manifest import BLOCK_BYTES, CheckpointPart, block_count, checksum_block
from holdfast.checkpoint.storage_errors import CorruptError, StorageError
from holdfast.checkpoint.storage_opener import File, Storage


class PartPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A byte range of one rank's part, and the offset in the target memory where it belongs."""

    rank: int
    start: int
    bytes: int
    to: int


class BlockCut(msgspec.Struct, frozen=True):
    """A byte range within one block, and the offset in the target memory where it belongs."""

    start: int
    bytes: int
    to: int


class PartReader:
    """Opens part files for one thread, one at a time: a checkpoint may have more files than a process may open."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._part: CheckpointPart | None = None
        self._file: File | None = None

    def open(self, part: CheckpointPart) -> File:
        if self._file is None or self._part is not part:
            self.close()
            self._file, self._part = open_part(self._storage, part), part
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def cut_blocks(
    pieces: Sequence[PartPiece], parts: dict[int, CheckpointPart], room: int
) -> dict[tuple[int, int], list[BlockCut]]:
    """Map every needed block, by rank and block number, to the byte ranges to copy out of it."""
    cuts: dict[tuple[int, int], list[BlockCut]] = {}
    for piece in pieces:
        if not 0 <= piece.start <= piece.start + piece.bytes <= parts[piece.rank].bytes:
            raise StorageError(f"{parts[piece.rank].file} has no bytes {piece.start} to {piece.start + piece.bytes}")
        if not 0 <= piece.to <= piece.to + piece.bytes <= room:
            raise ValueError(f"memory of {room} bytes has no room for {piece}")
        at, end = piece.start, piece.start + piece.bytes
        while at < end:
            block, inside = divmod(at, BLOCK_BYTES)
            count = min(BLOCK_BYTES - inside, end - at)
            cuts.setdefault((piece.rank, block), []).append(BlockCut(inside, count, piece.to + at - piece.start))
            at += count
    return cuts


def place_block(
    reader: PartReader, part: CheckpointPart, block: int, memory: tuple[memoryview, memoryview], cuts: list[BlockCut]
) -> None:
    """Read one block and copy its `cuts` into the first of the two memories. The second memory is spare space."""
    into, spare = memory
    size = block_bytes(part, block)
    whole = cuts[0].bytes == size
    target = into[cuts[0].to : cuts[0].to + size] if whole else spare[:size]
    if why := check_block(reader, part, block, target, spare):
        raise CorruptError(why)
    for cut in cuts[1:] if whole else cuts:
        into[cut.to : cut.to + cut.bytes] = target[cut.start : cut.start + cut.bytes]


def check_block(reader: PartReader, part: CheckpointPart, block: int, target: memoryview, spare: memoryview) -> str:
    """Read one block into `target`; return one sentence on what is wrong with it, or "" if its checksum matches."""
    start = block * BLOCK_BYTES
    where = f"{part.file}: block {block} of {block_count(part.bytes)} (bytes {start} to {start + len(target)})"
    try:
        count = reader.open(part).read(start, target, spare)
    except OSError as e:
        return f"{where} cannot be read: {e.strerror or e}"
    if count < len(target):
        return f"{where} ends after {count} bytes"
    return "" if checksum_block(target) == part.block_checksum(block) else f"{where} does not match its checksum"


def block_bytes(part: CheckpointPart, block: int) -> int:
    return min(BLOCK_BYTES, part.bytes - block * BLOCK_BYTES)


def open_part(storage: Storage, part: CheckpointPart) -> File:
    file = storage.open(part.file)
    if file is None:
        raise CorruptError(f"{part.file} is missing")
    if file.bytes != part.bytes:
        file.close()
        raise CorruptError(f"{part.file} has {file.bytes} bytes instead of {part.bytes}")
    return file
