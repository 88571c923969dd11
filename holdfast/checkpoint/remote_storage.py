"""Checkpoint storage on any file system that fsspec supports; writing the manifest last publishes a checkpoint."""

import posixpath
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from holdfast.checkpoint.direct_io import MemoryRanges, spare_block
from holdfast.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    WriteAttempt,
    block_count,
    check_small,
    checksum_block,
    step_name,
    tagged_of,
)
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.write_lane import WritePulse

_MOST_PIECES = 9000  # of one upload; S3 takes 10,000
# Folders are only names there, and "making" one might make a bucket out of a misspelt address.
_FLAT = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "memory"}


class RemoteStorage:
    """One folder or prefix; names are relative to it. Every exception becomes a StorageError with one sentence."""

    def __init__(self, url: str) -> None:
        with _as_storage_error(f"{url} cannot be opened"):
            import fsspec  # type: ignore[import-untyped]  # a tenth of a second that those with local disks need not spend

            self._fs, self._path = fsspec.core.url_to_fs(url)
        self._path = self._path.rstrip("/")

    def url(self, name: str = "") -> str:
        return str(self._fs.unstrip_protocol(self._path_of(name)))

    def read_identity(self) -> tuple[int, int] | None:
        """Return None: a folder on this storage is only a prefix of names and has no identity."""
        return None

    def staging_name(self, step: int, tag: str) -> str:
        # Nothing can be renamed here. With its author in the name nobody else ever writes into this folder.
        return step_name(step, tag)

    def list_names(self, folder: str = "") -> list[str]:
        """Return the sorted names in a folder; empty if the folder does not exist."""
        with _as_storage_error(f"{self.url(folder)} cannot be listed"):
            self._fs.invalidate_cache()  # here and below: other nodes write here too
            try:
                found = self._fs.ls(self._path_of(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted({posixpath.basename(path.rstrip("/")) for path in found} - {""})

    def list_unpublished(self) -> list[WriteAttempt]:
        """List folders without a manifest: their write or removal has not finished."""
        attempts = [attempt for name in self.list_names() if (attempt := tagged_of(name))]
        return [attempt for attempt in attempts if self.file_size(f"{attempt.name}/{MANIFEST}") is None]

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist."""
        with _as_storage_error(f"{self.url(name)} cannot be read"):
            check_small(name, self.file_size(name) or 0)
            try:
                return bytes(self._fs.cat_file(self._path_of(name)))
            except FileNotFoundError:
                return None

    def file_size(self, name: str) -> int | None:
        """Return the size of a file; None if it does not exist."""
        with _as_storage_error(f"{self.url(name)} cannot be looked at"):
            self._fs.invalidate_cache()
            try:
                return int(self._fs.info(self._path_of(name))["size"])
            except FileNotFoundError:
                return None

    def open(self, name: str) -> "RemoteInput | None":
        """Open a file to read it in blocks; None if it does not exist."""
        size = self.file_size(name)
        return None if size is None else RemoteInput(self._fs, self._path_of(name), size)

    def make_folder(self, folder: str = "") -> None:
        protocol = self._fs.protocol if isinstance(self._fs.protocol, str) else self._fs.protocol[0]
        with _as_storage_error(f"{self.url(folder)} cannot be made"):
            if protocol not in _FLAT:
                self._fs.makedirs(self._path_of(folder), exist_ok=True)

    def put_file(self, name: str, content: bytes) -> None:
        """Write a small file atomically."""
        with _as_storage_error(f"{self.url(name)} cannot be written"):
            self._fs.pipe_file(self._path_of(name), content)

    def put_mark(self, name: str, content: bytes) -> None:
        self.put_file(name, content)

    def write(self, name: str, ranges: Sequence[memoryview], threads: int, pulse: WritePulse) -> str:
        """Write a large file in one stream; return the checksums of its blocks. Ranks upload in parallel."""
        source = MemoryRanges(ranges)
        piece = max(BLOCK_BYTES, -(-source.bytes // _MOST_PIECES))
        sums: list[str] = []
        spare = spare_block()
        with _as_storage_error(f"{self.url(name)} cannot be written"):
            with self._fs.open(self._path_of(name), "wb", block_size=piece) as file:
                for index in range(block_count(source.bytes)):
                    block = source.read_block(index, spare)
                    sums.append(checksum_block(block))
                    file.write(block)
                    pulse.add_bytes(len(block))
            pulse.add_bytes()
        if (size := self.file_size(name)) != source.bytes:
            raise StorageError(f"{self.url(name)} has {size} bytes after {source.bytes} were written")
        return "".join(sums)

    def sync_folder(self, folder: str = "") -> None:
        """Do nothing: this storage makes every finished write durable."""

    def remove_file(self, name: str) -> None:
        """Remove a file if it exists."""
        with _as_storage_error(f"{self.url(name)} cannot be removed"), suppress(FileNotFoundError):
            self._fs.rm_file(self._path_of(name))

    def drop_empty_folder(self) -> None:
        """Do nothing: without files there is no folder here."""

    def publish(self, staged: str, step: int) -> str:
        """Return the folder's name unchanged: writing the manifest has already published the checkpoint."""
        return staged

    def remove_folder(self, folder: str) -> None:
        """Unpublish a checkpoint by removing its manifest, then remove its files."""
        self.remove_file(f"{folder}/{MANIFEST}")
        with _as_storage_error(f"{self.url(folder)} cannot be removed"), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            self._fs.rm(self._path_of(folder), recursive=True)

    def _path_of(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path


class RemoteInput:
    def __init__(self, fs: Any, path: str, size: int) -> None:
        self._fs = fs
        self._path = path
        self.bytes = size

    def close(self) -> None:
        """Do nothing: no file is held open."""

    def read(self, offset: int, into: memoryview, spare: memoryview) -> int:
        """Fill `into` from this offset; return the number of bytes read."""
        with _as_storage_error(f"{self._path} cannot be read"):
            got = self._fs.cat_file(self._path, start=offset, end=offset + len(into))
        into[: len(got)] = got
        return len(got)


@contextmanager
def _as_storage_error(what: str) -> Iterator[None]:
    """Turn every exception into a StorageError, because fsspec passes on the exceptions of hundreds of libraries."""
    try:
        yield
    except StorageError:
        raise
    except Exception as e:
        raise StorageError(f"{what}: {str(e) or type(e).__name__}") from e
