"""Locks that prove a folder deserted: the kernel lets go of one when its last holder has ended, however it ended.

Whoever lives in a folder shares its lock and hands it on to the processes it starts there. Who wants to remove what was
left takes it alone: that works only when all of them are gone, and nobody moves in meanwhile.
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
    """Why nothing is proven, to be put after the name of the folder."""


def lock_shared(folder: Path) -> tuple[int, ...]:
    """Live here until this file, and every copy that a child was given, is closed.

    The answer is made for `pass_fds`. Empty: this file system has no locks, so nobody will ever clean up here.
    BlockingIOError: somebody is at it just now.
    """
    fd = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    """The same, for a child that is started now."""
    files = lock_shared(folder)
    try:
        yield files
    finally:
        for fd in files:
            os.close(fd)


def lock_file_alone(path: Path, wait_s: float) -> int | None:
    """A file that no other process has in this way until it is closed; None: one has it all the time.

    Where the file system has no locks everybody gets it.
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
    """Keep everybody out until the file is closed; None: somebody lives here. LockError: that cannot be told."""
    try:
        fd = os.open(folder / NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise LockError("has no lock") from None
    except OSError as e:
        raise LockError(f"has a lock that cannot be opened: {e.strerror}") from None
    try:
        host = os.pread(fd, 1024, 0).decode("utf-8", "replace")
        if host != socket.gethostname():
            raise LockError(f"is of host {host or 'nobody knows which'}, where its processes can be seen")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except LockError:
        os.close(fd)
        raise
    except OSError as e:
        os.close(fd)
        raise LockError(f"has a lock that cannot be asked: {e.strerror}") from None
    return fd
