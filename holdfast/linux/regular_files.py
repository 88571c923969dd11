"""Opens files that others may have replaced by pipes, devices or links to them, which must block no reader."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


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
