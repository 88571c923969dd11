"""What a checkpoint on storage is made of: the names of its files, their checksums, and the manifest that seals it."""

import re
from collections.abc import Iterable
from typing import TypeVar

import msgspec
import xxhash

from holdfast.core.decoding import from_json

BLOCK_BYTES = 8 << 20  # what is read, written and checked at once
FORMAT = 1
MANIFEST = "holdfast.json"
METADATA = ".metadata"  # torch's own, so that torch alone can load the checkpoint

_STEP = re.compile(r"step-([0-9]{8,18})(?:\.([\w.-]+))?")
_STAGED = re.compile(r"\.step-([0-9]{8,18})\.(tmp|gone)-([\w.-]+)")
_PART = re.compile(r"__[0-9]{1,18}_0\.json")
T = TypeVar("T", bound=msgspec.Struct)


class StorageError(Exception):
    """One sentence: what storage did not do."""


class CorruptError(StorageError):
    """One sentence: which file, and where known which block of it, is not as it was written."""


class Author(msgspec.Struct, frozen=True):
    """Who writes: one generation of one run. Every launch of the ranks is another author."""

    generation: int
    run: str = ""

    @property
    def tag(self) -> str:
        run = re.sub(r"[^\w.-]", "_", self.run, flags=re.ASCII)
        return f"{run}-{self.generation}" if run else str(self.generation)


class WriteAttempt(msgspec.Struct, frozen=True):
    """A folder that is not a checkpoint: being written by the author of the tag, or, without one, being removed."""

    name: str
    step: int
    tag: str


class WriterProcess(msgspec.Struct, frozen=True):
    """One process for all time: a number that is used again has another start."""

    host: str  # with its boot and its space of process numbers
    pid: int
    start: int


class CheckpointPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote: one file, checked block by block. The part file itself lies beside it."""

    rank: int
    bytes: int
    blocks: str  # 16 hex digits of XXH3-64 for each block
    writer: WriterProcess
    done: bool = True  # the file is whole and on stable storage
    why: str = ""  # it never will be

    @property
    def file(self) -> str:
        return f"__{self.rank}_0.distcp"

    @property
    def name(self) -> str:
        return part_name(self.rank)

    def block_checksum(self, block: int) -> str:
        return self.blocks[16 * block : 16 * block + 16]


class SealedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A small file, with the digest of all of it; a part seals its large one in turn."""

    name: str
    bytes: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Written last: with it a checkpoint exists, and every byte of it can be checked."""

    format: int = FORMAT
    step: int
    world: int
    author: Author
    at: float
    layout: str = ""  # hex of the layout's hash
    torch: str = ""  # version that wrote the metadata
    bytes: int = 0  # of all parts
    files: tuple[SealedFile, ...] = ()
    seal: str = ""  # digest of all the above


def part_name(rank: int) -> str:
    return f"__{rank}_0.json"


def checksum_block(block: memoryview | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(block)


def content_digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def block_count(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def seal_file(name: str, content: bytes) -> SealedFile:
    return SealedFile(name=name, bytes=len(content), digest=content_digest(content))


def encode_part(part: CheckpointPart) -> bytes:
    return msgspec.json.encode(part)


def decode_part(content: bytes) -> CheckpointPart:
    part = _decode_json(content, CheckpointPart)
    if part.done and len(part.blocks) != 16 * block_count(part.bytes):
        raise CorruptError("is not as it was written")
    return part


def encode_manifest(manifest: Manifest) -> bytes:
    body = msgspec.json.encode(msgspec.structs.replace(manifest, seal=""))
    return msgspec.json.encode(msgspec.structs.replace(manifest, seal=content_digest(body)))


def decode_manifest(content: bytes) -> Manifest:
    """The manifest, if not a byte of it has changed."""

    class Head(msgspec.Struct):
        format: int

    if (found := _decode_json(content, Head).format) != FORMAT:
        raise CorruptError(f"has format {found}, and this version of holdfast reads format {FORMAT}")
    manifest = _decode_json(content, Manifest)
    known = all(
        file.name == METADATA or is_part_name(file.name) for file in manifest.files
    )  # and no way out of the folder
    # Written anew it must be the same: so a change that still parses, even of white space, is seen.
    if not known or encode_manifest(manifest) != content:
        raise CorruptError("is not as it was written")
    return manifest


def _decode_json(content: bytes, kind: type[T]) -> T:
    try:
        return from_json(content, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError):
        raise CorruptError("is not as it was written") from None


def step_name(step: int, mark: str = "") -> str:
    return f"step-{step:08d}" + (f".{mark}" if mark else "")


def staged_name(step: int, tag: str) -> str:
    """A folder being written; the leading dot keeps it out of everybody's sight."""
    return f".step-{step:08d}.tmp-{tag}"


def gone_name(step: int, mark: str) -> str:
    """A folder being removed: once it has this name, anybody may finish that."""
    return f".step-{step:08d}.gone-{mark}"


def step_of(name: str) -> int | None:
    """The step, if this is the name of a checkpoint's folder."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def staged_of(name: str) -> WriteAttempt | None:
    """The attempt, if this is the name of a folder being written or removed."""
    found = _STAGED.fullmatch(name)
    return WriteAttempt(name, int(found[1]), found[3] if found[2] == "tmp" else "") if found else None


def tagged_of(name: str) -> WriteAttempt | None:
    """The attempt, if this is the name of a folder on remote storage, where none can be renamed."""
    found = _STEP.fullmatch(name)
    return WriteAttempt(name, int(found[1]), found[2]) if found and found[2] else None


def is_part_name(name: str) -> bool:
    return _PART.fullmatch(name) is not None


def missing_ranks(parts: Iterable[CheckpointPart], world: int) -> list[int]:
    """Of so many ranks, those without a finished part."""
    return sorted(set(range(world)) - {part.rank for part in parts if part.done})
