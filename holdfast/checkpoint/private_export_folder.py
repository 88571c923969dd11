"""A folder in which files are made before they are moved to where others look for them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast.checkpoint.storage_errors import StorageError


@contextmanager
def private_folder(folder: Path) -> Iterator[str]:
    """Make a folder within `folder` that only we can write to, and yield a path to it that nobody else can redirect."""
    try:
        made = TemporaryDirectory(dir=folder, prefix=".export-")
    except OSError as e:
        raise StorageError(f"{folder} cannot be written to: {e}") from None
    with made as path:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                raise StorageError(f"somebody replaced {path}")
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)


def move_out(private: str, folder: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """Move these files and folders from a private folder to `folder`, in this order; StorageError if one is there. A
    link in the place of one is replaced, and nothing is written through it."""
    if taken := [name for name in names if os.path.lexists(folder / name) and not (folder / name).is_symlink()]:
        raise StorageError(f"{folder / taken[0]} exists already")
    for name in names:
        try:
            os.rename(f"{private}/{name}", folder / name)
        except OSError as e:
            raise StorageError(f"{folder / name} cannot be written: {e}") from None
    return tuple(folder / name for name in names)
