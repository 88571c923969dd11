"""The certificate serials of a job's nodes, by node name, kept in a file beside the job's keys.

Each node adds one line of JSON. To rewrite the whole file each time would take quadratic time in the number of nodes.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from holdfast.core.decoding import from_json

_NAME = "nodes.json"


def read_serials(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / _NAME).read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    found: dict[str, str] = {}
    for line in filter(None, lines):
        with contextlib.suppress(msgspec.DecodeError):  # cut short as the power went: nobody was told that it is in
            found |= from_json(line, dict[str, str])
    return found


def add_serial(folder: Path, name: str, serial: str) -> None:
    """Append a node's serial and wait until it is on disk; never writes through a symbolic link."""
    path = folder / _NAME
    is_new = not path.exists()
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb", buffering=0) as file:
        # A line of its own, although the one before may have been cut short.
        file.write(b"\n" + msgspec.json.encode({name: serial}) + b"\n")
        os.fsync(fd)
    if is_new:
        whole = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fsync(whole)
        os.close(whole)
