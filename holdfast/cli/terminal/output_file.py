"""Writes the output files of commands: each file is made anew and renamed, so that no link is followed."""

import errno
import os
import secrets
import stat
from pathlib import Path


def replace_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file whole or not at all; other users cannot read it unless `mode` says so. Raise OSError if that fails,
    or if the path exists and is no plain file: in a shared folder it may be another user's link to one of this user's
    files."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EEXIST, "it is a link, or no plain file; name another", str(path))
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(part, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def make_private_file(path: Path) -> None:
    """Make a file that only this user can read and write, for another program to append to. A file that exists is kept,
    and gets the same mode. Raises OSError if the file is another user's, or is not a plain file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_nlink != 1:
            raise OSError(errno.EEXIST, "it is another user's, or no plain file", str(path))
        os.fchmod(fd, 0o600)
    finally:
        os.close(fd)
