"""Files by which an agent and its ranks exchange longer texts, and files with the ranks' pids. Such texts are the mesh,
the job's figures, trackers, where losses are read, and whether the script can be replayed."""

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from holdfast.decoding import from_json
from holdfast.linux.regular_files import read_start
from holdfast.model.job_and_seats import Dims
from holdfast.wire import progress_environment, replay_environment, run_and_node_specs
from holdfast.wire.agent_messages import JobFigures

_WORDS_BYTES = 200  # of a file in which a rank says where its losses are read from, or which trackers it uses
_NOTE_BYTES, _MESH_BYTES = 4096, 16 << 20  # a larger one is no such note, or of more ranks than any job has


def read_notes(mesh: Path) -> dict[str, Any]:
    """Return the fields of a beat that notes of ranks fill: the file `mesh` and files beside it."""
    told = {"replayable": read_replayable(mesh.parent), "trackers": read_trackers(mesh.parent)}
    return {"mesh": read_mesh(mesh), **told}


def read_mesh(path: Path) -> Dims:
    """Return the parallel groups that a rank has reported; empty if the file is missing or damaged."""
    try:
        return from_json(read_start(path, _MESH_BYTES), Dims)
    except (OSError, msgspec.DecodeError, RecursionError):
        return ()


def read_replayable(folder: Path) -> str:
    """Return "seeded" or "unseeded", as the script declared for replays; empty if it declared nothing."""
    try:
        note = from_json(read_start(folder / replay_environment.NOTE, _NOTE_BYTES), dict[str, object])
    except (OSError, msgspec.DecodeError, RecursionError):
        return ""
    return "seeded" if note.get("seeded") else "unseeded"


def read_loss_source(folder: Path) -> str:
    """Return where a rank says that its losses are read from; "" if no rank says so, as when scripts report losses."""
    return _read_text(folder / progress_environment.LOSS_SOURCE)


def read_trackers(folder: Path) -> str:
    """Return which trackers a rank uses, in words; empty if none."""
    return _read_text(folder / progress_environment.TRACKERS)


def _read_text(path: Path) -> str:
    try:
        return read_start(path, _WORDS_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def note_pid(folder: Path, rank: int, pid: int) -> str:
    """Write a rank's pid to its log folder, for other tools; return an error, or "" if it was written."""
    try:
        run_and_node_specs.publish_file(folder / "pid", f"{pid}\n".encode())
    except OSError as e:
        return f"rank {rank}: cannot write to its log folder {folder}: {e.strerror}"
    return ""


def write_figures(folder: Path, figures: JobFigures) -> None:
    """Write the job's figures to where the ranks read them. If that fails, trackers keep showing older figures."""
    with contextlib.suppress(OSError):
        run_and_node_specs.publish_file(folder / progress_environment.FIGURES, msgspec.json.encode(figures))
