"""Reads checkpoints from storage and verifies the checksum of every block before its bytes are used."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from holdfast.checkpoint.checkpoint_publication import SMALL_AT_ONCE
from holdfast.checkpoint.direct_io import THREADS, run_in_threads, spare_block
from holdfast.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    CheckpointPart,
    Manifest,
    SealedFile,
    block_count,
    content_digest,
    decode_manifest,
    decode_part,
    is_part_name,
    part_name,
    step_of,
)
from holdfast.checkpoint.storage_errors import CorruptError, StorageError
from holdfast.checkpoint.storage_opener import Storage, open_storage
from holdfast.checkpoint.verified_block_reads import (
    PartPiece,
    PartReader,
    block_bytes,
    check_block,
    cut_blocks,
    open_part,
    place_block,
)


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
    parts = _read_parts(storage, pieces)
    cuts = cut_blocks(pieces, parts, len(into))
    blocks = sorted(cuts)

    def work(turns: Iterator[int]) -> None:
        spare = spare_block()
        with closing(PartReader(storage)) as reader:
            for turn in turns:
                rank, block = blocks[turn]
                place_block(reader, parts[rank], block, (into, spare), cuts[rank, block])
                moved(sum(cut.bytes for cut in cuts[rank, block]))

    run_in_threads(len(blocks), threads, work)


def find_parts(url: str, pieces: Sequence[PartPiece]) -> tuple[Storage, dict[int, CheckpointPart]]:
    """Return the storage of a checkpoint and, by rank, the parts that these pieces lie in."""
    storage = open_storage(url)
    return storage, _read_parts(storage, pieces)


def _read_parts(storage: Storage, pieces: Sequence[PartPiece]) -> dict[int, CheckpointPart]:
    ranks = sorted({piece.rank for piece in pieces})
    small = _read_small(storage, [part_name(rank) for rank in ranks])
    return {rank: decode_part(content) for rank, content in zip(ranks, small, strict=True)}


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
                    open_part(storage, part).close()
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
        with closing(PartReader(storage)) as reader:
            for turn in turns:
                part, block = blocks[turn]
                if why := check_block(reader, part, block, spare[: block_bytes(part, block)], spare):
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
