"""Errands that were carried out, on the node's disk: told again, they are answered, not repeated."""

import contextlib
import os
from pathlib import Path

import msgspec

from holdfast.model.errand import Done


def remember(path: Path, done: Done) -> None:
    with path.open("ab") as file:
        file.write(b"\n" + msgspec.json.encode(done))  # the line before may be torn
        file.flush()
        os.fsync(file.fileno())


def recall(path: Path) -> tuple[Done, ...]:
    """Errands carried out by earlier agents; a line torn by a crash was never acknowledged."""
    if not path.exists():
        return ()
    done = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            done.append(msgspec.json.decode(line, type=Done))
    return tuple(done)
