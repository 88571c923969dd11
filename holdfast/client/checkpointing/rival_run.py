"""Looks for another run that writes checkpoints to the same path. The two would remove each other's checkpoints."""

import os

from holdfast.checkpoint.state_image import StateError
from holdfast.checkpoint.stored_checkpoints import find_rival
from holdfast.client.checkpointing.rank_collectives import RankWorld

_LOOKS = 2  # a path is taken with the first checkpoint; if both runs came to theirs at once, the second one shows it


class RivalRun:
    """A rival: another run that writes to our path on rank 0's host. Every search for a rival is a collective."""

    def __init__(self, url: str, world: RankWorld, *, with_agent: bool) -> None:
        self._url = url
        self._world = world
        self._run_id = os.environ.get("TORCHELASTIC_RUN_ID", "") if with_agent else ""
        self._looks = 0
        self.sentence = self._find()

    def _find(self) -> str:
        return self._world.broadcast_first(find_rival(self._url, self._run_id) if self._world.rank == 0 else "", str)

    def check_save(self) -> None:
        """Raise StateError if there is a rival. If one was found earlier, first look whether it has ended."""
        if self.sentence:
            self.sentence = self._find()
        if self.sentence:
            raise StateError(f"cannot save: {self.sentence}")

    def check_due(self) -> None:
        """Before each of the first checkpoints, look for a rival run again; raise StateError if there is one. A rival
        that had written nothing yet could not be seen when the Checkpointer was made."""
        if self._looks == _LOOKS:
            return
        self._looks += 1
        self.sentence = self._find()
        if self.sentence:
            raise StateError(f"cannot save: {self.sentence}")
