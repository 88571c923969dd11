"""Locks that prove that nobody uses a folder; the kernel frees a lock when its last holder ends for any reason.

A process that uses a folder shares its lock and passes it on to the processes that it starts there. A process that
wants to remove leftovers takes the lock exclusively: that works only when all users are gone, and keeps new ones out.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "lock"
_LOOK_S = 0.05


class LockError(Exception):
    """Nobody can tell whether a folder is in use; the message is a clause that follows the folder's name."""


def lock_shared(folder: Path) -> tuple[int, ...]:
    """Lock a folder as in use, until this process and all children that inherit the lock file have closed it.

    Return the descriptor of the lock file, to be passed on in `pass_fds`. Return an empty tuple if the file system has
    no locks; then no process will remove the folder. Raise BlockingIOError if a process holds the lock exclusively.
    """
    fd = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.fstat(fd).st_size:
            os.pwrite(fd, socket.gethostname().encode(), 0)  # locks may not be seen from other hosts
    except BlockingIOError:
        os.close(fd)
        raise
    except OSError as e:
        if e.errno == errno.ENOSPC:
            return (fd,)
        os.close(fd)
        return ()
    return (fd,)


@contextmanager
def shared_lock(folder: Path) -> Iterator[tuple[int, ...]]:
    """Share the folder's lock during the block; a child process started in the block inherits the lock."""
    files = lock_shared(folder)
    try:
        yield files
    finally:
        for fd in files:
            os.close(fd)


def lock_file_alone(path: Path, wait_s: float) -> int | None:
    """Open a file, locked exclusively until it is closed. Return None if another process keeps the lock for `wait_s`
    seconds.

    On a file system without locks every caller gets the file.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(fd)
                return None
            time.sleep(_LOOK_S)
        except OSError:
            return fd
        else:
            return fd


def lock_exclusively(folder: Path) -> int | None:
    """Lock a folder exclusively and return the descriptor of its lock file. Return None if a process uses the folder.
    Raise LockError if nobody can tell whether one does."""
    try:
        fd = os.open(folder / NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise LockError("has no lock") from None
    except OSError as e:
        raise LockError(f"has a lock that cannot be opened: {e.strerror}") from None
    try:
        host = os.pread(fd, 1024, 0).decode("utf-8", "replace")
        if host != socket.gethostname():
            raise LockError(f"is locked by {f'host {host}' if host else 'an unknown host'}; run this command there")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except LockError:
        os.close(fd)
        raise
    except OSError as e:
        os.close(fd)
        raise LockError(f"has a lock that cannot be tested: {e.strerror}") from None
    return fd
