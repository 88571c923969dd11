"""Blocks to files and back: any cut of memory into ranges, with direct I/O, where it is refused, and when it fails."""

import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import direct_io
from holdfast.checkpoint.manifest import BLOCK_BYTES, checksum_block
from holdfast.checkpoint.storage_errors import WriteGivenUpError
from holdfast.checkpoint.write_lane import WritePulse
from tests.checkpoint.making import content, in_pages

SIZES = (0, 1, 511, 4096, 5000, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 4096)


def sums(whole: bytes) -> str:
    return "".join(checksum_block(whole[at : at + BLOCK_BYTES]) for at in range(0, len(whole), BLOCK_BYTES))


def read_back(path: Path) -> bytes:
    file = direct_io.InputFile(str(path))
    memory, spare = in_pages(bytes(file.bytes)), direct_io.spare_block()
    for at in range(0, file.bytes, BLOCK_BYTES):
        assert file.read(at, memory[at : at + BLOCK_BYTES], spare) == len(memory[at : at + BLOCK_BYTES])
    file.close()
    return bytes(memory)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("off", [0, 1, 512], ids=["on a page", "off a page", "on a sector"])
def test_what_is_written_is_read(tmp_path: Path, size: int, off: int) -> None:
    path, whole = tmp_path / "file", content(size + off, size)
    pulse = WritePulse()
    assert direct_io.write_file(str(path), [in_pages(whole)[off:]], 3, pulse) == sums(whole[off:])
    assert pulse.bytes == size
    assert path.read_bytes() == whole[off:]
    assert read_back(path) == whole[off:]


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ends=st.lists(st.integers(0, 2 * BLOCK_BYTES + 777), max_size=6))
def test_ranges_make_one_file(tmp_path: Path, ends: list[int]) -> None:
    whole = content(2 * BLOCK_BYTES + 777, 1)
    cuts = [0, *sorted(ends), len(whole)]
    memory = in_pages(whole)
    ranges = [memory[a:b] for a, b in pairwise(cuts)]
    path = tmp_path / "file"
    assert direct_io.write_file(str(path), ranges, 2, WritePulse()) == sums(whole)
    assert path.read_bytes() == whole


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refusing(fd: int, command: int, flags: int = 0) -> Any:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refusing)


def refuse_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that takes the flag, and then no such write."""
    real = os.pwrite

    def refusing(fd: int, block: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, block, offset)

    monkeypatch.setattr(os, "pwrite", refusing)


@pytest.mark.parametrize("refuse", [refuse_direct, refuse_blocks])
def test_without_direct_io_it_goes_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Any
) -> None:
    refuse(monkeypatch)
    whole, path, pulse = content(BLOCK_BYTES + 5000, 1), tmp_path / "step" / "file", WritePulse()
    path.parent.mkdir()
    assert direct_io.write_file(str(path), [in_pages(whole)], 1, pulse) == sums(whole)
    assert read_back(path) == whole
    [note] = pulse.notes
    assert str(tmp_path) in note


def test_a_file_system_that_cannot_reserve_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(direct_io, "_libc", type("Libc", (), {"fallocate": staticmethod(cannot)}))
    assert direct_io.write_file(str(tmp_path / "file"), [memoryview(b"some")], 1, WritePulse()) == sums(b"some")


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, block, offset: real(fd, block[: 1 << 20], offset))
    whole = content(BLOCK_BYTES + 3 * 4096, 1)
    direct_io.write_file(str(tmp_path / "file"), [in_pages(whole)], 2, WritePulse())
    assert (tmp_path / "file").read_bytes() == whole


def test_an_old_file_is_never_written_into(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with path.open("rb") as held:
        direct_io.write_file(str(path), [memoryview(b"new")], 1, WritePulse())
        assert held.read() == b"old"
    assert path.read_bytes() == b"new"


def test_the_first_error_ends_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def work(turns: Iterator[int]) -> None:
        for turn in turns:
            taken.append(turn)
            if turn == 5:
                raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        direct_io.run_in_threads(100_000, 3, work)
    assert len(taken) < 100_000


def test_a_bug_in_a_thread_is_not_taken_for_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    turned: list[int] = []

    def work(turns: Iterator[int]) -> None:
        if turned:
            raise KeyError("a bug")
        turned.append(1)
        for _ in turns:
            pass

    with pytest.raises((RuntimeError, KeyError)):
        direct_io.run_in_threads(10, 2, work)


def test_a_write_that_was_given_up_is_not_done(tmp_path: Path) -> None:
    pulse = WritePulse()
    pulse.give_up()
    with pytest.raises(WriteGivenUpError):
        direct_io.write_file(str(tmp_path / "file"), [], 1, pulse)


def test_after_giving_up_no_further_block_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulse, real, seen = WritePulse(), os.pwrite, list[int]()

    def put(fd: int, block: memoryview, offset: int) -> int:
        seen.append(pulse.bytes)
        if len(seen) == 2:
            pulse.give_up()
        return real(fd, block, offset)

    monkeypatch.setattr(os, "pwrite", put)
    with pytest.raises(WriteGivenUpError):
        direct_io.write_file(str(tmp_path / "file"), [in_pages(content(4 * BLOCK_BYTES, 1))], 1, pulse)
    assert seen == [0, BLOCK_BYTES]  # a block that was written is a sign of life
