"""The certificate serials of a job's nodes, by node name, kept in a file beside the job's keys.

Each node adds one line of JSON, with a seal. Rewriting the whole file each time would take quadratic time.
"""

import os
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.decoding import from_json

_NAME = "nodes.json"


class RecordedSerials(NamedTuple):
    """What the file says: serials by node name, and how many of its lines are damaged."""

    serials: dict[str, str]
    damaged: int
    path: Path


def read_serials(folder: Path) -> RecordedSerials:
    found, damaged, path = dict[str, str](), 0, folder / _NAME
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        lines = []
    for line in filter(None, lines):
        try:
            found |= _read_line(line)
        except (msgspec.DecodeError, ValueError):  # changed, or cut short as the power went
            damaged += 1
    return RecordedSerials(found, damaged, path)


def _read_line(line: bytes) -> dict[str, str]:
    """Return the names and serials of one line. Raise ValueError if the line is damaged."""
    if line.startswith(b"{"):  # as lines were before they had a seal
        return from_json(line, dict[str, str])
    name, serial, seal = from_json(line, tuple[str, str, str])
    if seal != _seal_of(name, serial):
        raise ValueError("the seal is of another line")
    return {name: serial}


def _seal_of(name: str, serial: str) -> str:
    return blake2b(f"{name} {serial}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def add_serial(folder: Path, name: str, serial: str) -> None:
    """Append a node's serial and wait until it is on disk; never writes through a symbolic link."""
    path = folder / _NAME
    is_new = not path.exists()
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb", buffering=0) as file:
        # A line of its own, although the one before may have been cut short.
        file.write(b"\n" + msgspec.json.encode((name, serial, _seal_of(name, serial))) + b"\n")
        os.fsync(fd)
    if is_new:
        whole = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fsync(whole)
        os.close(whole)
