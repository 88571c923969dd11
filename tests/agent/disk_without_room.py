"""A disk that is full for some files: whoever publishes one of them is told so."""

import errno
import os
from pathlib import Path

import pytest

from holdfast.linux.regular_files import open_to_write
from holdfast.wire import run_and_node_specs


def leave_no_room(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Until `patch` is undone, files of these names cannot be published."""

    def open_with_room(path: str, flags: int, mode: int) -> tuple[int, str]:
        if any(name in Path(path).name for name in names):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return open_to_write(path, flags, mode)

    patch.setattr(run_and_node_specs, "open_to_write", open_with_room)
