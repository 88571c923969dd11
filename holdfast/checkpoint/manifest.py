"""The files of a checkpoint on storage: their names, their checksums, and the manifest that seals them."""

import re
from collections.abc import Iterable
from typing import Annotated, TypeVar

import msgspec
import xxhash

from holdfast.checkpoint.storage_errors import CorruptError, StorageError
from holdfast.decoding import from_json
from holdfast.model.message_bounds import Number

BLOCK_BYTES = 8 << 20  # what is read, written and checked at once
FORMAT = 1
MANIFEST = "holdfast.json"
METADATA = ".metadata"  # torch's own, so that torch alone can load the checkpoint
_SMALL_BYTES, _METADATA_BYTES = 16 << 20, 2 << 30  # manifests of 100,000 ranks are smaller; whoever writes may lie

_MOST_AT = 1e11  # the year 5138
_STEP = re.compile(r"step-([0-9]{8,18})(?:\.([\w.-]+))?")
_STAGED = re.compile(r"\.step-([0-9]{8,18})\.(tmp|gone)-([\w.-]+)")
_PART = re.compile(r"__[0-9]{1,18}_0\.json")
T = TypeVar("T", bound=msgspec.Struct)


class Author(msgspec.Struct, frozen=True):
    """The writer of checkpoints: one generation of one run. Every launch of the ranks is another author."""

    generation: int
    run: str = ""

    @property
    def tag(self) -> str:
        run = re.sub(r"[^\w.-]", "_", self.run, flags=re.ASCII)
        return f"{run}-{self.generation}" if run else str(self.generation)


class WriteAttempt(msgspec.Struct, frozen=True):
    """A folder that is being written by the author in `tag`, or is being removed if `tag` is empty."""

    name: str
    step: int
    tag: str


class WriterProcess(msgspec.Struct, frozen=True):
    """A process, identified uniquely over time: a reused pid has another start time."""

    host: str  # with its boot and its space of process numbers
    pid: int
    start: int


class CheckpointPart(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one rank's data file with the checksum of each block; stored beside the data file."""

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
    """The name, size and digest of a small file, as a manifest lists them."""

    name: str
    bytes: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The file that is written last and makes a folder a checkpoint; every byte can be checked against it."""

    format: int = FORMAT
    step: Number
    world: Number
    author: Author
    at: Annotated[float, msgspec.Meta(ge=0.0, le=_MOST_AT)]
    layout: str = ""  # hex of the layout's hash
    torch: str = ""  # version that wrote the metadata
    bytes: Number = 0  # of all parts
    files: tuple[SealedFile, ...] = ()
    seal: str = ""  # digest of all the above


def check_small(name: str, size: int) -> None:
    """Raise StorageError if a file, which will be read whole, exceeds the size limit for its kind."""
    most = _METADATA_BYTES if name.endswith(METADATA) else _SMALL_BYTES
    if size > most:
        raise StorageError(f"{name} has {size:,} bytes, and no such file has more than {most:,}: it is not read")


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
    """Decode a manifest; raises CorruptError if any byte has changed."""

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
    """Return the name of a folder that is being written; the leading dot hides it."""
    return f".step-{step:08d}.tmp-{tag}"


def gone_name(step: int, mark: str) -> str:
    """Return the name of a folder that is being removed; any process may finish the removal."""
    return f".step-{step:08d}.gone-{mark}"


def step_of(name: str) -> int | None:
    """Parse the step out of a checkpoint folder's name; None if the name is not of that form."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def staged_of(name: str) -> WriteAttempt | None:
    """Parse the name of an unpublished folder into step and author's tag; None if the name is not of that form."""
    found = _STAGED.fullmatch(name)
    return WriteAttempt(name, int(found[1]), found[3] if found[2] == "tmp" else "") if found else None


def tagged_of(name: str) -> WriteAttempt | None:
    """Parse a checkpoint folder's name that ends in an author's tag, as on remote storage; None if it has no tag."""
    found = _STEP.fullmatch(name)
    return WriteAttempt(name, int(found[1]), found[2]) if found and found[2] else None


def is_part_name(name: str) -> bool:
    return _PART.fullmatch(name) is not None


def missing_ranks(parts: Iterable[CheckpointPart], world: int) -> list[int]:
    """Return the ranks of this world that have no finished part."""
    return sorted(set(range(world)) - {part.rank for part in parts if part.done})
