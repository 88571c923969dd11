"""How a rank is told that it takes part in a replay; every script pays for the imports here, so there are few."""

import os

TYPE_CHECKING = False  # importing typing would take longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.model.replay_task import ReplayTask

REPLAY = "HOLDFAST_REPLAY"  # the name of the replay
STEPS = "HOLDFAST_REPLAY_STEPS"
FOLDER = "HOLDFAST_REPLAY_FOLDER"  # where all output goes
NOT_AFTER = "HOLDFAST_REPLAY_NOT_AFTER"

NOTE = "replayable"  # the file beside the keeper's socket by which a script has said that it may be replayed


def replay_variables(replay: "ReplayTask", folder: str) -> dict[str, str]:
    return {REPLAY: replay.name, STEPS: str(replay.steps), FOLDER: folder, NOT_AFTER: str(replay.not_after)}


def is_replay() -> bool:
    return bool(os.environ.get(REPLAY))


def redirect_path(path: str) -> str:
    """Where what would be written there is written to: in a replay, under its own folder."""
    return os.path.join(os.environ[FOLDER], os.path.basename(path.rstrip("/")) or "out") if is_replay() else path


def signature_path(folder: str, rank: int) -> str:
    """The file in which a rank tells what it signed: a line for each step, as none may be lost."""
    return os.path.join(folder, f"signed-{rank}")


def encode_signature(step: int, state: int, sent: int | None) -> bytes:
    """The signatures of the rank's state after the step, and of what it sent to others in it, where that was signed."""
    return f"{step} {state} {'-' if sent is None else sent}\n".encode()


def decode_signatures(text: bytes) -> "Iterator[tuple[int, int, int | None]]":
    """What `line_of` wrote, as far as it is whole."""
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        try:
            step, state, sent = line.split()
            yield int(step), int(state), None if sent == b"-" else int(sent)
        except ValueError:  # not ours: a script may write to any file
            continue
