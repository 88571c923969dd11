"""RUN_DIR/journal.mark: records how far the journal was written, in a file of its own, to detect lost entries.

SQLite silently drops the end of a write-ahead log whose checksum is wrong. The mark has two records, written in turn
and in place. The file never grows, so a full disk does not stop it; if one record is torn, the other remains.
"""

import contextlib
import errno
import hashlib
import os
import time
from pathlib import Path

import msgspec

from holdfast.decoding import from_msgpack
from holdfast.journal.journal_errors import JournalError, JournalFullError
from holdfast.model.job_phase import Phase

SYNC_S = 1.0  # at least so long between two syncs, unless more has changed than the number of entries
TOUCH_S = 1.0
_HALF = 512  # bytes; disks write so many at once
_SUM = 16
_EMPTY = bytes(_HALF)


class HighWaterMark(msgspec.Struct, frozen=True, kw_only=True):
    """The last journal entry known to be on disk, and the job's generation, release and phase at that entry."""

    start: bytes  # of its chain: which journal it is
    epoch: int
    seq: int = 0
    chain: bytes = b""
    generation: int = 0  # newest that was launched
    release: int = 0  # of it
    phase: Phase = Phase.NEW

    @property
    def job_standing(self) -> tuple[int, int, int, Phase]:
        return self.epoch, self.generation, self.release, self.phase


class _Half(msgspec.Struct, frozen=True, array_like=True):
    writes: int
    mark: HighWaterMark


class MarkReading(msgspec.Struct, frozen=True, kw_only=True):
    mark: HighWaterMark | None = None
    there: bool = False
    damaged: bool = False  # a half of it at least; there may have been a newer one


def read_mark(path: Path) -> MarkReading:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return MarkReading()
    except OSError as e:
        raise JournalError(f"{path} cannot be read: {e.strerror}") from None
    halves = [_read_half(content[at : at + _HALF]) for at in (0, _HALF)]
    found = [half for half in halves if half is not None]
    damaged = len(content) != 2 * _HALF or any(
        half is None and content[at : at + _HALF] != _EMPTY for half, at in zip(halves, (0, _HALF), strict=True)
    )
    newest = max(found, key=lambda half: half.writes, default=None)
    damaged = damaged or (len(found) == 1 and found[0].writes > 0)  # then both were written
    return MarkReading(mark=newest.mark if newest else None, there=True, damaged=damaged or newest is None)


def describe_absence(path: Path, found: MarkReading, so: str) -> str:
    """Say that a mark is gone or damaged, and what follows; "" if a writer has made it since it was found missing."""
    if found.there:
        return f"{path} is damaged{so}"
    return "" if path.exists() else f"{path} is gone{so}"


def read_sign_of_life(path: Path) -> float:
    """Return the Unix time at which the mark's writer was last alive; 0 if there is no mark."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read_half(half: bytes) -> _Half | None:
    size = int.from_bytes(half[_SUM : _SUM + 2], "little")
    body = half[_SUM : _SUM + 2 + size]
    if hashlib.blake2b(body, digest_size=_SUM).digest() != half[:_SUM]:
        return None
    with contextlib.suppress(msgspec.DecodeError):
        return from_msgpack(body[2:], _Half)
    return None


def _encode_half(half: _Half) -> bytes:
    content = msgspec.msgpack.encode(half)
    body = len(content).to_bytes(2, "little") + content
    return (hashlib.blake2b(body, digest_size=_SUM).digest() + body).ljust(_HALF, b"\0")


class MarkFile:
    """The writer's open handle on the mark file."""

    def __init__(self, path: Path, mark: HighWaterMark) -> None:
        """Replace the mark file, atomically, with one that only its owner can read. Raise JournalError on failure."""
        self._path = path
        self._mark = mark
        self._writes = 0
        self._synced_at = self._touched_at = time.monotonic()
        try:
            self._fd = self._make_file(_encode_half(_Half(0, mark)) + _EMPTY)
        except OSError as e:
            raise self._make_error(e) from None

    def _make_file(self, content: bytes) -> int:
        whole = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        whole.unlink(missing_ok=True)
        fd = os.open(whole, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, content, 0)
            os.fsync(fd)
            whole.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError:
            os.close(fd)
            whole.unlink(missing_ok=True)
            raise
        return fd

    def write_mark(self, mark: HighWaterMark) -> None:
        """Write the mark. Call this only after the entries that the mark covers are on disk. A mark that is not synced
        yet is lost only in a power cut."""
        self._writes += 1
        now = time.monotonic()
        changed, self._mark = mark.job_standing != self._mark.job_standing, mark
        try:
            os.pwrite(self._fd, _encode_half(_Half(self._writes, mark)), _HALF * (self._writes % 2))
            if changed or now >= self._synced_at + SYNC_S:
                os.fdatasync(self._fd)
                self._synced_at = now
        except OSError as e:
            raise self._make_error(e) from None

    def touch_file(self) -> None:
        """Set the modification time of the mark file to now, at most once a second. From this time the next writer
        learns how long this writer was alive."""
        now = time.monotonic()
        if now >= self._touched_at + TOUCH_S:
            self._touched_at = now
            with contextlib.suppress(OSError):
                os.utime(self._fd)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.fdatasync(self._fd)
        os.close(self._fd)

    def _make_error(self, why: OSError) -> JournalError:
        if why.errno in (errno.ENOSPC, errno.EDQUOT):
            return JournalFullError(f"{self._path} cannot be written: the disk that holds it is full")
        return JournalError(f"{self._path} cannot be written: {why.strerror}")
