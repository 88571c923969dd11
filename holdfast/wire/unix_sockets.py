"""Unix sockets at paths of any length, reached through an open folder, since the kernel's limit is 107 bytes."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path


def listen(path: Path, backlog: int = 16) -> socket.socket:
    """Return a listening socket that only its owner can use. Raise FileExistsError if another process listens there."""
    if _is_answered(path):
        raise FileExistsError(f"another process listens at {path}")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), stat.S_IRUSR | stat.S_IWUSR)  # what bind makes takes its mode from here
        _call_through_folder(path, listener.bind)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def connect(path: Path) -> socket.socket:
    """Return a socket connected to the process that listens at this path. Raise OSError if none does."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _call_through_folder(path, peer.connect)
    except OSError:
        peer.close()
        raise
    return peer


def _is_answered(path: Path) -> bool:
    try:
        connect(path).close()
    except OSError:
        return False
    return True


def _call_through_folder(path: Path, act: Callable[[str], None]) -> None:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        act(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
