"""What outlives an agent on the node's disk: errands that were carried out, and since when there is no controller."""

import contextlib
import os
import time
from pathlib import Path

import msgspec

from holdfast.model.errand import Done
from holdfast.wire import spec

_ALONE = "alone"


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


def parted(node_dir: Path) -> float:
    """Since when there is no controller, by the steady clock; an agent that is started anew does not count anew."""
    now = time.monotonic()
    with contextlib.suppress(OSError, ValueError):  # a full disk costs no more than that it does
        if (node_dir / _ALONE).exists():
            return min(now, float((node_dir / _ALONE).read_text()))
        spec.put(node_dir / _ALONE, f"{now}\n".encode())
    return now


def met(node_dir: Path) -> None:
    """There is one; or there is nothing yet to be alone with, as the holder has just been started."""
    with contextlib.suppress(OSError):
        (node_dir / _ALONE).unlink(missing_ok=True)
