"""Reads and writes files in blocks with several threads, bypassing the page cache where the file system allows it."""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from holdfast.checkpoint.manifest import BLOCK_BYTES, block_count, checksum_block
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.write_lane import WritePulse
from holdfast.linux.regular_files import open_regular

THREADS = 4  # they wait more than they work: while one checks its block, the device still has enough to do
_ALIGNED = 4096  # addresses, offsets and lengths of direct I/O are multiples of this
_NO_ROOM_AHEAD = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_libc = ctypes.CDLL(None, use_errno=True)


class SharedTurns:
    """An iterator of numbers that several threads share; it stops after the first error."""

    def __init__(self, count: int) -> None:
        self._left = iter(range(count))
        self._lock = threading.Lock()
        self.errors: list[OSError | StorageError] = []

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        with self._lock:
            if self.errors:
                raise StopIteration
            return next(self._left)


def run_in_threads(count: int, threads: int, work: Callable[[Iterator[int]], None]) -> None:
    """Run `work` in threads that share the numbers of range(count). The first error ends all threads and is raised."""
    turns = SharedTurns(count)
    ended: list[bool] = []

    def take() -> None:
        try:
            work(turns)
        except (OSError, StorageError) as e:
            turns.errors.append(e)
        else:
            ended.append(True)

    extra = [threading.Thread(target=take, daemon=True) for _ in range(min(threads, count) - 1)]
    for thread in extra:
        thread.start()
    take()
    for thread in extra:
        thread.join()
    if turns.errors:
        raise turns.errors[0]
    if len(ended) <= len(extra):
        raise RuntimeError("a thread crashed")


def spare_block() -> memoryview:
    """Return page-aligned memory for one block. Callers use it for blocks that they cannot read or write in place."""
    return memoryview(mmap.mmap(-1, BLOCK_BYTES))


class MemoryRanges:
    """Several memory ranges, read as one contiguous file."""

    def __init__(self, ranges: Sequence[memoryview]) -> None:
        self._views = [view.cast("B") for view in ranges if view.nbytes]
        self._ends: list[int] = []
        for view in self._views:
            self._ends.append(self.bytes + len(view))

    @property
    def bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read_block(self, index: int, spare: memoryview) -> memoryview:
        """Return one block: a view if the block lies within one range, else a copy in `spare`."""
        start = index * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, self.bytes)
        number = bisect_right(self._ends, start)
        filled = 0
        while filled < end - start:
            view = self._views[number]
            at = start + filled - (self._ends[number] - len(view))
            piece = view[at : at + end - start - filled]
            if len(piece) == end - start:
                return piece
            spare[filled : filled + len(piece)] = piece
            filled += len(piece)
            number += 1
        return spare[:filled]


def write_file(path: str, ranges: Sequence[memoryview], threads: int, pulse: WritePulse) -> str:
    """Write memory to a new file on stable storage; return the checksums of its blocks."""
    source = MemoryRanges(ranges)
    with suppress(FileNotFoundError):
        os.unlink(path)  # never into an old file: a writer that once hung may still hold it
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        make_room(fd, _round_up(source.bytes))
        file = _OutputFile(fd, path, pulse)
        sums = _write_blocks(file, source, threads, pulse)
        os.ftruncate(fd, source.bytes)  # the last block was written in whole pages
        os.fsync(fd)
        file.drop_cache()
    finally:
        os.close(fd)
    pulse.add_bytes()
    return sums


def _write_blocks(file: "_OutputFile", source: MemoryRanges, threads: int, pulse: WritePulse) -> str:
    sums = [""] * block_count(source.bytes)

    def work(turns: Iterator[int]) -> None:
        spare = spare_block()
        for index in turns:
            block = source.read_block(index, spare)
            sums[index] = checksum_block(block)
            file.write(index * BLOCK_BYTES, block, spare)
            pulse.add_bytes(len(block))

    run_in_threads(len(sums), threads, work)
    return "".join(sums)


def make_room(fd: int, size: int) -> None:
    """Preallocate the file, so that a full disk is detected before anything is written."""
    # Not posix_fallocate: where the file system cannot, glibc writes a byte into every block instead.
    if size and _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        if code not in _NO_ROOM_AHEAD:
            raise OSError(code, os.strerror(code))


class _OutputFile:
    def __init__(self, fd: int, path: str, pulse: WritePulse) -> None:
        self._fd = fd
        self._path = path
        self._pulse = pulse
        self._direct = _set_direct(fd, True)
        if not self._direct:
            self._note_cached()

    def write(self, offset: int, block: memoryview, spare: memoryview) -> None:
        direct = self._direct  # another thread may find out meanwhile
        if direct and not len(block) % _ALIGNED and self._write_at(offset, block, direct):
            return
        if direct:
            padded = spare[: _round_up(len(block))]
            padded[: len(block)] = block
            padded[len(block) :] = bytes(len(padded) - len(block))
            if self._write_at(offset, padded, direct):
                return
            self._direct = _set_direct(self._fd, False)
            self._note_cached()
        self._write_at(offset, block, False)

    def drop_cache(self) -> None:
        if not self._direct:  # it would push out what training has there
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _write_at(self, offset: int, block: memoryview, direct: bool) -> bool:
        """Write the whole block and return True. Return False if direct I/O does not accept this memory."""
        while block:
            try:
                count = os.pwrite(self._fd, block, offset)
            except OSError as e:
                if direct and e.errno == errno.EINVAL:
                    return False
                raise
            if not count:
                raise OSError(errno.EIO, "nothing was written")
            block, offset = block[count:], offset + count
        return True

    def _note_cached(self) -> None:
        folder = os.path.dirname(os.path.dirname(self._path))
        self._pulse.notes.append(f"{folder} does not support direct I/O; writing through the page cache")


class InputFile:
    """A file that is read in blocks."""

    def __init__(self, path: str) -> None:
        self._fd = open_regular(path)
        self.bytes = os.fstat(self._fd).st_size
        self._direct = _set_direct(self._fd, True)

    def close(self) -> None:
        os.close(self._fd)

    def read(self, offset: int, into: memoryview, spare: memoryview) -> int:
        """Fill `into` from this offset, in place if direct I/O allows it; return the number of bytes read."""
        direct = self._direct
        if direct and not len(into) % _ALIGNED and (count := self._read_at(offset, into, direct)) is not None:
            return count
        if direct:
            padded = spare[: _round_up(len(into))]
            if (count := self._read_at(offset, padded, direct)) is not None:
                count = min(count, len(into))
                into[:count] = padded[:count]
                return count
            self._direct = _set_direct(self._fd, False)
        return self._read_at(offset, into, False) or 0

    def _read_at(self, offset: int, into: memoryview, direct: bool) -> int | None:
        """Read from the file until `into` is full or the file ends. Return the number of bytes read, or None if direct
        I/O does not accept this memory."""
        filled = 0
        while filled < len(into):
            try:
                count = os.preadv(self._fd, [into[filled:]], offset + filled)
            except OSError as e:
                if direct and e.errno == errno.EINVAL:
                    # Past the end of a file whose size is no multiple of a page, this is how the end looks.
                    return filled if filled and offset + filled >= self.bytes else None
                raise
            if not count:
                break
            filled += count
        return filled


def _set_direct(fd: int, on: bool) -> bool:
    """Turn direct I/O for this file on or off; return True only if it has been turned on."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return on


def _round_up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
