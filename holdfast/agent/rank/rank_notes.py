"""Files about ranks: the notes that they leave for their agent (mesh, replayable, source of losses), and their pids."""

from pathlib import Path

import msgspec

from holdfast.core.decoding import from_json
from holdfast.model.job_and_seats import Dims
from holdfast.wire import progress_environment, replay_environment, run_and_node_specs

_SOURCE_BYTES = 200  # of the file in which a rank says where its losses are read from


def read_mesh(path: Path) -> Dims:
    """Return the parallel groups that a rank has reported; empty if the file is missing or damaged."""
    try:
        return from_json(path.read_bytes(), Dims)
    except (OSError, msgspec.DecodeError):
        return ()


def read_replayable(folder: Path) -> str:
    """Return "seeded" or "unseeded", as the script declared for replays; empty if it declared nothing."""
    try:
        note = from_json((folder / replay_environment.NOTE).read_bytes(), dict[str, object])
    except (OSError, msgspec.DecodeError):
        return ""
    return "seeded" if note.get("seeded") else "unseeded"


def read_loss_source(folder: Path) -> str:
    """Return where a rank's losses are read from; empty if nowhere, or if the script reports them itself."""
    try:
        source = (folder / progress_environment.LOSS_SOURCE).read_bytes()
    except OSError:
        return ""
    return source[:_SOURCE_BYTES].decode("utf-8", "replace")


def note_pid(folder: Path, rank: int, pid: int) -> str:
    """Write a rank's pid to its log folder, for people's own tools; return an error or an empty text."""
    try:
        run_and_node_specs.publish_file(folder / "pid", f"{pid}\n".encode())
    except OSError as e:
        return f"rank {rank}: cannot write to its log folder {folder}: {e.strerror}"
    return ""
