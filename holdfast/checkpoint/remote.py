"""Checkpoints on any storage that fsspec has a file system for; there the manifest, written last, is what publishes."""

import posixpath
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from holdfast.checkpoint.direct import Ranges, spare_block
from holdfast.checkpoint.lane import Pulse
from holdfast.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    Attempt,
    StorageError,
    block_count,
    checksum,
    step_name,
    tagged_of,
)

_MOST_PIECES = 9000  # of one upload; S3 takes 10,000
# Folders are only names there, and "making" one might make a bucket out of a misspelt address.
_FLAT = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "memory"}


class Remote:
    """One folder, or prefix. Names are relative to it; whatever the file system raises becomes one sentence."""

    def __init__(self, url: str) -> None:
        with _told(f"{url} cannot be opened"):
            import fsspec  # type: ignore[import-untyped]  # a tenth of a second that those with local disks need not spend

            self._fs, self._path = fsspec.core.url_to_fs(url)
        self._path = self._path.rstrip("/")

    def url(self, name: str = "") -> str:
        return str(self._fs.unstrip_protocol(self._at(name)))

    def staged(self, step: int, tag: str) -> str:
        # Nothing can be renamed here. With its author in the name nobody else ever writes into this folder.
        return step_name(step, tag)

    def names(self, folder: str = "") -> list[str]:
        """What lies in a folder; nothing when it is not there."""
        with _told(f"{self.url(folder)} cannot be listed"):
            self._fs.invalidate_cache()  # here and below: other nodes write here too
            try:
                found = self._fs.ls(self._at(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted({posixpath.basename(path.rstrip("/")) for path in found} - {""})

    def unpublished(self) -> list[Attempt]:
        """Writes that have not come to their end, and removals that have not."""
        attempts = [attempt for name in self.names() if (attempt := tagged_of(name))]
        return [attempt for attempt in attempts if self.size(f"{attempt.name}/{MANIFEST}") is None]

    def read(self, name: str) -> bytes | None:
        """A small file; None when it is not there."""
        with _told(f"{self.url(name)} cannot be read"):
            try:
                return bytes(self._fs.cat_file(self._at(name)))
            except FileNotFoundError:
                return None

    def size(self, name: str) -> int | None:
        """None when it is not there."""
        with _told(f"{self.url(name)} cannot be looked at"):
            self._fs.invalidate_cache()
            try:
                return int(self._fs.info(self._at(name))["size"])
            except FileNotFoundError:
                return None

    def open(self, name: str) -> "RemoteInput | None":
        """A file to be read in blocks; None when it is not there."""
        size = self.size(name)
        return None if size is None else RemoteInput(self._fs, self._at(name), size)

    def make(self, folder: str = "") -> None:
        protocol = self._fs.protocol if isinstance(self._fs.protocol, str) else self._fs.protocol[0]
        with _told(f"{self.url(folder)} cannot be made"):
            if protocol not in _FLAT:
                self._fs.makedirs(self._at(folder), exist_ok=True)

    def put(self, name: str, content: bytes) -> None:
        """A small file: whole, or as it was before."""
        with _told(f"{self.url(name)} cannot be written"):
            self._fs.pipe_file(self._at(name), content)

    def write(self, name: str, ranges: Sequence[memoryview], threads: int, pulse: Pulse) -> str:
        """A large file; returns the checksums of its blocks. One stream: ranks upload side by side."""
        source = Ranges(ranges)
        piece = max(BLOCK_BYTES, -(-source.bytes // _MOST_PIECES))
        sums: list[str] = []
        spare = spare_block()
        with _told(f"{self.url(name)} cannot be written"):
            with self._fs.open(self._at(name), "wb", block_size=piece) as file:
                for index in range(block_count(source.bytes)):
                    block = source.block(index, spare)
                    sums.append(checksum(block))
                    file.write(block)
                    pulse.beat(len(block))
            pulse.beat()
        if (size := self.size(name)) != source.bytes:
            raise StorageError(f"{self.url(name)} has {size} bytes after {source.bytes} were written")
        return "".join(sums)

    def sync(self, folder: str = "") -> None:
        """What has been taken is durable here."""

    def drop(self, name: str) -> None:
        """Remove a file, if it is there."""
        with _told(f"{self.url(name)} cannot be removed"), suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name))

    def publish(self, staged: str, step: int) -> str:
        """The manifest has done it."""
        return staged

    def remove(self, folder: str) -> None:
        """Take a checkpoint back in one instant, by its manifest, then remove its files."""
        self.drop(f"{folder}/{MANIFEST}")
        with _told(f"{self.url(folder)} cannot be removed"), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            self._fs.rm(self._at(folder), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path


class RemoteInput:
    def __init__(self, fs: Any, path: str, size: int) -> None:
        self._fs = fs
        self._path = path
        self.bytes = size

    def close(self) -> None:
        """Nothing is held open."""

    def read(self, offset: int, into: memoryview, spare: memoryview) -> int:
        """Fill memory; returns how many bytes there were."""
        with _told(f"{self._path} cannot be read"):
            got = self._fs.cat_file(self._path, start=offset, end=offset + len(into))
        into[: len(got)] = got
        return len(got)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Not a narrow error: fsspec's file systems raise whatever the libraries beneath them do, hundreds of kinds."""
    try:
        yield
    except StorageError:
        raise
    except Exception as e:
        raise StorageError(f"{what}: {str(e) or type(e).__name__}") from e
