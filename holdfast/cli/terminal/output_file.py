"""Writes the output files of commands: each file is made anew and renamed, so that no link is followed."""

import errno
import os
import secrets
import stat
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all; OSError if that fails or the path exists and is no plain file.

    In a shared folder another user may have put a link at the path, which could lead to any file of ours."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EEXIST, "it is a link, or no plain file; name another", str(path))
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with part.open("x", encoding="utf-8") as file:
            file.write(text)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
