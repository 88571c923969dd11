"""Environment variables and files of a rank in a replay. Every script imports this module, so it imports little."""

import os

TYPE_CHECKING = False  # importing typing would take longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.model.replay_task import ReplayTask

REPLAY = "HOLDFAST_REPLAY"  # the name of the replay
STEPS = "HOLDFAST_REPLAY_STEPS"
FOLDER = "HOLDFAST_REPLAY_FOLDER"  # where all output goes
NOT_AFTER = "HOLDFAST_REPLAY_NOT_AFTER"
RANKS = "HOLDFAST_REPLAY_RANKS"  # of the group that replays
JOB_RANKS = "HOLDFAST_REPLAY_JOB_RANKS"

NOTE = "replayable"  # the file beside the keeper's socket by which a script has said that it may be replayed


def replay_variables(replay: "ReplayTask", folder: str) -> dict[str, str]:
    numbers = {STEPS: replay.steps, NOT_AFTER: replay.not_after, RANKS: replay.ranks, JOB_RANKS: replay.job_ranks}
    return {REPLAY: replay.name, FOLDER: folder, **{name: str(number) for name, number in numbers.items()}}


def is_replay() -> bool:
    return bool(os.environ.get(REPLAY))


def redirect_path(path: str) -> str:
    """Return the path that a rank must write to: in a replay, one in the replay's folder; otherwise `path` itself."""
    return os.path.join(os.environ[FOLDER], os.path.basename(path.rstrip("/")) or "out") if is_replay() else path


def signature_path(folder: str, rank: int) -> str:
    """Return the path of a rank's signature file in a replay's folder; the file has one line per step."""
    return os.path.join(folder, f"signed-{rank}")


def encode_signature(step: int, state: int, sent: int | None) -> bytes:
    """Return a line with a step, the hash of the rank's state after it, and the hash of the data sent, if any."""
    return f"{step} {state} {'-' if sent is None else sent}\n".encode()


def decode_signatures(text: bytes) -> "Iterator[tuple[int, int, int | None]]":
    """Yield step, state hash and sent hash of every line by encode_signature; other lines are skipped."""
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        try:
            step, state, sent = line.split()
            yield int(step), int(state), None if sent == b"-" else int(sent)
        except ValueError:  # not ours: a script may write to any file
            continue
