"""Locks prove who is alive, whatever the processes that hold them die of."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.wire import folder_use_lock

SLEEP = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that was given the lock of this folder."""
    with folder_use_lock.shared_lock(tmp_path) as held:
        process = subprocess.Popen(SLEEP, stdin=subprocess.PIPE, pass_fds=held)
    yield process
    process.kill()
    process.communicate()


def taken_at_last(folder: Path) -> int:
    """A process that was killed is gone a moment later; so is a file that a new program does not keep."""
    until = time.monotonic() + 30
    while (taken := folder_use_lock.lock_exclusively(folder)) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return taken


def close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


def test_many_may_live_here_and_one_may_remove(tmp_path: Path) -> None:
    first, second = folder_use_lock.lock_shared(tmp_path), folder_use_lock.lock_shared(tmp_path)
    assert folder_use_lock.lock_exclusively(tmp_path) is None
    close(first)
    assert folder_use_lock.lock_exclusively(tmp_path) is None
    close(second)
    taken = folder_use_lock.lock_exclusively(tmp_path)
    assert taken is not None
    with pytest.raises(BlockingIOError):
        folder_use_lock.lock_shared(tmp_path)
    assert folder_use_lock.lock_exclusively(tmp_path) is None, "nor do two remove at once"
    os.close(taken)
    close(folder_use_lock.lock_shared(tmp_path))


def test_the_lock_outlives_whoever_handed_it_on(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    assert folder_use_lock.lock_exclusively(tmp_path) is None
    child.send_signal(signal.SIGSTOP)
    assert folder_use_lock.lock_exclusively(tmp_path) is None, "a stopped process is alive"
    child.kill()
    os.close(taken_at_last(tmp_path))


def test_a_program_that_is_not_given_the_lock_does_not_have_it(tmp_path: Path) -> None:
    held = folder_use_lock.lock_shared(tmp_path)
    with subprocess.Popen(SLEEP, stdin=subprocess.PIPE, close_fds=False) as stranger:
        close(held)
        os.close(taken_at_last(tmp_path))
        stranger.communicate()


def test_what_cannot_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(folder_use_lock.LockError, match=r"lock$"):
        folder_use_lock.lock_exclusively(tmp_path)
    close(folder_use_lock.lock_shared(tmp_path))
    here = socket.gethostname()
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(folder_use_lock.LockError, match=rf"\bhost {here}\b"):
        folder_use_lock.lock_exclusively(tmp_path)
    (tmp_path / folder_use_lock.NAME).unlink()
    (tmp_path / folder_use_lock.NAME).mkdir()
    with pytest.raises(folder_use_lock.LockError, match=os.strerror(errno.EISDIR)):
        folder_use_lock.lock_exclusively(tmp_path)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert folder_use_lock.lock_shared(tmp_path) == (), "training goes on"
    (tmp_path / folder_use_lock.NAME).write_text(socket.gethostname())
    with pytest.raises(folder_use_lock.LockError, match="Operation not supported"):
        folder_use_lock.lock_exclusively(tmp_path)
