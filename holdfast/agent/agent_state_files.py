"""Notes on disk that outlive an agent: errands done, stops, epoch, leaving, and since when the controller is gone.

A note that cannot be written costs only the next agent's memory. The agent still acts: above all, it ends ranks even
if it cannot note that they were stopped.
"""

import contextlib
import logging
import os
import time
from pathlib import Path

import msgspec

from holdfast.core.agent_state_machine import HeedEpoch, RememberDone, RememberLeaving
from holdfast.core.decoding import from_json
from holdfast.model.errand import Done, Leave
from holdfast.wire import run_specs

_ALONE = "alone"
_EPOCH = "epoch"
_LEAVING = "leaving.json"
_LEFT = "left"
_STOPPED = "stopped"
_log = logging.getLogger("holdfast.agent")


def write_deed(node_dir: Path, deed: HeedEpoch | RememberDone | RememberLeaving) -> None:
    match deed:
        case HeedEpoch(epoch):
            write_epoch(node_dir, epoch)
        case RememberDone(done):
            append_done(node_dir / "done.jsonl", done)
        case RememberLeaving(errand):
            write_leave_intent(node_dir, errand)


def append_done(path: Path, done: Done) -> None:
    """Append a finished errand. On a disk error only log it: the next agent may safely repeat the errand."""
    try:
        with path.open("ab") as file:
            file.write(b"\n" + msgspec.json.encode(done))  # the line before may be torn
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        _log.warning("errand %d was carried out, and cannot be remembered: %s", done.id, e)


def read_done(path: Path) -> tuple[Done, ...]:
    """Return the errands that earlier agents finished. Skip a line torn by a crash: it was never acknowledged."""
    if not path.exists():
        return ()
    done = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            done.append(from_json(line, Done))
    return tuple(done)


def write_stopped(node_dir: Path, generation: int) -> None:
    _write_file(node_dir / _STOPPED, f"{generation}\n".encode())


def read_stopped(node_dir: Path) -> int:
    """Return the newest generation that this node was ordered to stop; 0 if there is none or the note is damaged."""
    path = node_dir / _STOPPED
    with contextlib.suppress(ValueError):  # a damaged note costs a launch that is told twice, not the agent
        return int(path.read_bytes()) if path.exists() else 0
    return 0


def write_epoch(node_dir: Path, epoch: int) -> None:
    _write_file(node_dir / _EPOCH, f"{epoch}\n".encode())


def read_epoch(node_dir: Path) -> int:
    """Return the epoch of the newest controller that this node has heard from, or 0."""
    with contextlib.suppress(OSError, ValueError):
        return int((node_dir / _EPOCH).read_bytes())
    return 0


def write_leave_intent(node_dir: Path, errand: Leave) -> None:
    _write_file(node_dir / _LEAVING, msgspec.json.encode(errand))


def read_leave_intent(node_dir: Path) -> Leave | None:
    """Return the Leave errand that an earlier agent began and did not finish, or None."""
    try:
        return run_specs.read_json(node_dir / _LEAVING, Leave)
    except (OSError, msgspec.DecodeError):
        return None


def write_leave_reason(node_dir: Path, errand: Leave) -> None:
    """Write down why this node left, for people who look for it."""
    _write_file(node_dir / _LEFT, f"{errand.reason}\n".encode())


def _write_file(path: Path, content: bytes) -> None:
    try:
        run_specs.publish_file(path, content)
    except OSError as e:
        _log.warning("%s cannot be written: %s", path, e)


def mark_alone(node_dir: Path) -> float:
    """Note that the controller is gone; return since when (monotonic). A restarted agent keeps the first instant."""
    now = time.monotonic()
    with contextlib.suppress(OSError, ValueError):  # a full disk costs no more than that it does
        if (node_dir / _ALONE).exists():
            return min(now, float((node_dir / _ALONE).read_text()))
        run_specs.publish_file(node_dir / _ALONE, f"{now}\n".encode())
    return now


def clear_alone(node_dir: Path) -> None:
    """Delete the note that the controller is gone."""
    with contextlib.suppress(OSError):
        (node_dir / _ALONE).unlink(missing_ok=True)


def reset_files(node_dir: Path) -> None:
    """Delete what the holder's last life left: since when the controller was gone, and an unfinished leave."""
    clear_alone(node_dir)
    with contextlib.suppress(OSError):
        (node_dir / _LEAVING).unlink(missing_ok=True)
