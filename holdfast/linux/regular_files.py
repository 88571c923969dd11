"""Opens files that others may have replaced by pipes, devices or links to them, which must block nobody."""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_NO_FILES = (errno.ELOOP, errno.EISDIR, errno.ENXIO)  # a link, a folder, a pipe or socket that nobody reads from
_TRIES = 8


def open_regular(path: str) -> int:
    """Open a file for reading. Raise OSError for a pipe or another special file, because it might block for ever."""
    fd = os.open(path, _FLAGS)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is no regular file", path)


def open_file(path: Path) -> BinaryIO:
    """Open a file as `open_regular` does."""
    return open(open_regular(str(path)), "rb")


def read_start(path: Path, most: int) -> bytes:
    """Return the first `most` bytes of a file. Raise OSError as `open_regular` does."""
    with open_file(path) as file:
        return file.read(most)


def read_end(path: Path, most: int) -> bytes:
    """Return the last `most` bytes of a file, which may grow meanwhile. Raise OSError as `open_regular` does."""
    with open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most)


def open_log(path: str) -> int:
    """Open a log for appending, and make it if it is missing. If something else is in its place, that is moved aside,
    and the log says where to."""
    fd, aside = open_to_write(path, os.O_APPEND, 0o600)
    if aside:
        os.write(fd, f"holdfast: in place of this log was no regular file; moved to {aside}\n".encode())
    return fd


def open_to_write(path: str, flags: int, mode: int) -> tuple[int, str]:
    """Open a regular file for writing, with these flags besides, and make it if it is missing. Move anything else that
    is in its place aside. Return the file and the new path of what was moved; "" if nothing was."""
    aside = ""
    for _ in range(_TRIES):
        try:
            fd = os.open(path, _MAKE | flags, mode)
        except OSError as e:
            if e.errno not in _NO_FILES:
                raise
        else:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                os.set_blocking(fd, True)
                return fd, aside
            os.close(fd)
        aside = move_aside(path)
    raise OSError(errno.EEXIST, "something else is put in its place again and again", path)


def move_aside(path: str) -> str:
    """Rename what is at this path to an unused name beside it, and return that name. It begins with a dot, so that
    nobody takes it for a log or for a rank's folder."""
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f".{name}.aside-{os.urandom(4).hex()}")
    with contextlib.suppress(FileNotFoundError):  # it is gone by now
        os.rename(path, aside)
    return aside
