"""How a rank is told that it takes part in a replay; every script pays for the imports here, so there are few."""

import os

TYPE_CHECKING = False  # importing typing would take longer than all the rest
if TYPE_CHECKING:
    from holdfast.model.replay import ReplayHere

REPLAY = "HOLDFAST_REPLAY"  # the name of the replay
STEPS = "HOLDFAST_REPLAY_STEPS"
FOLDER = "HOLDFAST_REPLAY_FOLDER"  # where all output goes
NOT_AFTER = "HOLDFAST_REPLAY_NOT_AFTER"

STATE, SENT = 0, 1  # groups of marks: of a rank's state, and of what it has sent to others in the step

NOTE = "replayable"  # the file beside the keeper's socket by which a script has said that it may be replayed


def environment(replay: "ReplayHere", folder: str) -> dict[str, str]:
    return {REPLAY: replay.name, STEPS: str(replay.steps), FOLDER: folder, NOT_AFTER: str(replay.not_after)}


def is_replay() -> bool:
    return bool(os.environ.get(REPLAY))


def redirected(path: str) -> str:
    """Where what would be written there is written to: in a replay, under its own folder."""
    return os.path.join(os.environ[FOLDER], os.path.basename(path.rstrip("/")) or "out") if is_replay() else path
