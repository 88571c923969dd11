"""Reads checkpoints from storage and verifies the checksum of every block before its bytes are used."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import msgspec

from holdfast.checkpoint.checkpoint_save import SMALL_AT_ONCE
from holdfast.checkpoint.direct_io import THREADS, run_in_threads, spare_block
from holdfast.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    METADATA,
    CheckpointPart,
    CorruptError,
    Manifest,
    SealedFile,
    StorageError,
    block_count,
    checksum_block,
    content_digest,
    decode_manifest,
    decode_part,
    is_part_name,
    part_name,
    step_of,
)
from holdfast.checkpoint.storage_opener import File, Storage, open_storage


class PartPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A byte range of one rank's part, and the offset in the target memory where it belongs."""

    rank: int
    start: int
    bytes: int
    to: int


class _BlockCut(msgspec.Struct, frozen=True):
    """A byte range within one block, and the offset in the target memory where it belongs."""

    start: int
    bytes: int
    to: int


class _PartReader:
    """Opens part files for one thread, one at a time: a checkpoint may have more files than a process may open."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._part: CheckpointPart | None = None
        self._file: File | None = None

    def open(self, part: CheckpointPart) -> File:
        if self._file is None or self._part is not part:
            self.close()
            self._file, self._part = _open_part(self._storage, part), part
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_manifest(url: str) -> Manifest:
    return _read_manifest(open_storage(url))


def read_metadata(url: str) -> bytes:
    """Return the content of the checkpoint's `.metadata` file, in torch's format."""
    return _read_small(open_storage(url), (METADATA,))[0]


def read_part(url: str, rank: int, into: memoryview, *, threads: int = THREADS) -> int:
    """Read one rank's part to the start of `into`; return its size in bytes."""
    size = decode_part(_read_small(open_storage(url), (part_name(rank),))[0]).bytes
    read_ranges(url, [PartPiece(rank=rank, start=0, bytes=size, to=0)], into, threads=threads)
    return size


def read_ranges(
    url: str,
    pieces: Sequence[PartPiece],
    into: memoryview,
    *,
    threads: int = THREADS,
    moved: Callable[[int], None] = lambda _: None,
) -> None:
    """Read pieces of parts into memory; `moved` is called with the number of bytes after each block.

    Raises CorruptError, naming the file and block, if a block differs from what was written; the memory is then
    unusable. Whole blocks that go to page-aligned addresses are read there without a copy.
    """
    storage = open_storage(url)
    ranks = sorted({piece.rank for piece in pieces})
    small = _read_small(storage, [part_name(rank) for rank in ranks])
    parts = {rank: decode_part(content) for rank, content in zip(ranks, small, strict=True)}
    cuts = _cut_blocks(pieces, parts, len(into))
    blocks = sorted(cuts)

    def work(turns: Iterator[int]) -> None:
        spare = spare_block()
        with closing(_PartReader(storage)) as reader:
            for turn in turns:
                rank, block = blocks[turn]
                _place_block(reader, parts[rank], block, (into, spare), cuts[rank, block])
                moved(sum(cut.bytes for cut in cuts[rank, block]))

    run_in_threads(len(blocks), threads, work)


def _cut_blocks(
    pieces: Sequence[PartPiece], parts: dict[int, CheckpointPart], room: int
) -> dict[tuple[int, int], list[_BlockCut]]:
    """Map every needed block, by rank and block number, to the byte ranges to copy out of it."""
    cuts: dict[tuple[int, int], list[_BlockCut]] = {}
    for piece in pieces:
        if not 0 <= piece.start <= piece.start + piece.bytes <= parts[piece.rank].bytes:
            raise StorageError(f"{parts[piece.rank].file} has no bytes {piece.start} to {piece.start + piece.bytes}")
        if not 0 <= piece.to <= piece.to + piece.bytes <= room:
            raise ValueError(f"memory of {room} bytes has no room for {piece}")
        at, end = piece.start, piece.start + piece.bytes
        while at < end:
            block, inside = divmod(at, BLOCK_BYTES)
            count = min(BLOCK_BYTES - inside, end - at)
            cuts.setdefault((piece.rank, block), []).append(_BlockCut(inside, count, piece.to + at - piece.start))
            at += count
    return cuts


def _place_block(
    reader: _PartReader, part: CheckpointPart, block: int, memory: tuple[memoryview, memoryview], cuts: list[_BlockCut]
) -> None:
    into, spare = memory
    size = _block_bytes(part, block)
    whole = cuts[0].bytes == size
    target = into[cuts[0].to : cuts[0].to + size] if whole else spare[:size]
    if why := _check_block(reader, part, block, target, spare):
        raise CorruptError(why)
    for cut in cuts[1:] if whole else cuts:
        into[cut.to : cut.to + cut.bytes] = target[cut.start : cut.start + cut.bytes]


def _check_block(reader: _PartReader, part: CheckpointPart, block: int, target: memoryview, spare: memoryview) -> str:
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


def _block_bytes(part: CheckpointPart, block: int) -> int:
    return min(BLOCK_BYTES, part.bytes - block * BLOCK_BYTES)


def verify_checkpoint(url: str, *, threads: int = THREADS) -> tuple[str, ...]:
    """Read a whole checkpoint and return one sentence for each defect; empty if there is none."""
    storage = open_storage(url)
    try:
        manifest = _read_manifest(storage)
        parts, found = _check_files(storage, manifest)
        return tuple(sorted([*found, *_check_blocks(storage, parts, threads)]))
    except StorageError as e:
        return (str(e),)


def _check_files(storage: Storage, manifest: Manifest) -> tuple[list[CheckpointPart], list[str]]:
    """Return the parts whose files have their full length, and one sentence for each file that is wrong."""
    parts: list[CheckpointPart] = []
    found: list[str] = []

    def work(turns: Iterator[int]) -> None:
        for turn in turns:
            expected = manifest.files[turn]
            try:
                content = _check_content(storage.read(expected.name), expected)
                if is_part_name(expected.name):
                    part = decode_part(content)
                    _open_part(storage, part).close()
                    parts.append(part)
            except StorageError as e:
                found.append(str(e))

    run_in_threads(len(manifest.files), SMALL_AT_ONCE, work)
    return parts, found


def _check_blocks(storage: Storage, parts: Sequence[CheckpointPart], threads: int) -> list[str]:
    blocks = [(part, block) for part in parts for block in range(block_count(part.bytes))]
    found: list[str] = []

    def work(turns: Iterator[int]) -> None:
        spare = spare_block()
        with closing(_PartReader(storage)) as reader:
            for turn in turns:
                part, block = blocks[turn]
                if why := _check_block(reader, part, block, spare[: _block_bytes(part, block)], spare):
                    found.append(why)

    run_in_threads(len(blocks), threads, work)
    return found


def _read_manifest(storage: Storage) -> Manifest:
    content = storage.read(MANIFEST)
    if content is None:
        raise CorruptError(f"{storage.url()} has no {MANIFEST}: it is not a checkpoint, or an unfinished one")
    try:
        manifest = decode_manifest(content)
    except CorruptError as e:
        raise CorruptError(f"{MANIFEST} {e}") from None
    named = step_of(storage.url().rstrip("/").rpartition("/")[2])
    if named is not None and named != manifest.step:
        raise CorruptError(f"{MANIFEST} is of step {manifest.step}, but in the folder of step {named}")
    return manifest


def _read_small(storage: Storage, names: Sequence[str]) -> list[bytes]:
    """Return the contents of these small files. Raises if one is missing or does not match the manifest."""
    manifest = _read_manifest(storage)
    expected = {file.name: file for file in manifest.files}
    if missing := sorted(set(names) - set(expected)):
        raise StorageError(f"the checkpoint of step {manifest.step} has no {missing[0]}")
    return [_check_content(storage.read(name), expected[name]) for name in names]


def _check_content(content: bytes | None, expected: SealedFile) -> bytes:
    if content is None:
        raise CorruptError(f"{expected.name} is missing")
    if len(content) != expected.bytes:
        raise CorruptError(f"{expected.name} has {len(content)} bytes instead of {expected.bytes}")
    if content_digest(content) != expected.digest:
        raise CorruptError(f"{expected.name} does not match its checksum")
    return content


def _open_part(storage: Storage, part: CheckpointPart) -> File:
    file = storage.open(part.file)
    if file is None:
        raise CorruptError(f"{part.file} is missing")
    if file.bytes != part.bytes:
        file.close()
        raise CorruptError(f"{part.file} has {file.bytes} bytes instead of {part.bytes}")
    return file
