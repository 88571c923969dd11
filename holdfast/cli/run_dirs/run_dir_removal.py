"""Removes files and folders of run directories without following links."""

import contextlib
import os
import shutil
import stat
from pathlib import Path


def remove_below(run_dir: Path, path: Path) -> None:
    """Remove a file or a whole folder below a run directory, if it exists. A link is removed and never followed.
    Raises OSError if a folder between `run_dir` and `path` is a link."""
    *folders, name = path.relative_to(run_dir).parts
    with contextlib.ExitStack() as opened, contextlib.suppress(FileNotFoundError):
        at = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, at)
        for folder in folders:
            at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            opened.callback(os.close, at)
        if stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=at)
        else:
            os.unlink(name, dir_fd=at)
