"""Chooses which steps all nodes write to their local disks, and which of these steps they keep.

A restore needs one step that is on the disks of all nodes. So the controller names one step at a time (the disk floor).
Once every node has written the disk floor, nodes keep it, and may remove older steps. Nodes report in their beats what
they have written.
"""

import re
from collections.abc import Collection, Mapping

import msgspec

from holdfast.model.observation import Beat


class DiskLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for states on the nodes' local disks."""

    path: str = ""  # a folder on every node's own disk; "": none are written
    every_s: float = 60.0  # from one write to the next at least
    keep: int = 2  # steps that every disk holds
    max_bytes: int = 0  # what the states of one node may take; 0: what the disk has

    def run_folder(self, run: str) -> str:
        """Return the folder for the states of a run; `run` is the run's `marked_id`."""
        return f"{self.path}/{re.sub(r'[^A-Za-z0-9_.-]', '_', run)}"


class DiskFloor:
    def __init__(self, limits: DiskLimits) -> None:
        self.limits = limits
        self.aim = -1  # the step that is being written; -1: none
        self._kept: tuple[int, ...] = ()  # steps that every disk holds, the newest last
        self._is_known = False  # whether all that every disk holds is among these
        self.missed = ""  # who could not write the newest step that all nodes have tried, in words
        self._newest = -1  # that was aimed at in this generation
        self._not_before = 0.0

    @property
    def newest_kept(self) -> int:
        """The newest step that every disk holds; -1 if there is none."""
        return self._kept[-1] if self._kept else -1

    @property
    def oldest_kept(self) -> int:
        """Return the step before which states on disk may be removed; -1 until every disk holds enough later steps."""
        return self._kept[0] if self._kept and (self._is_known or len(self._kept) >= self.limits.keep) else -1

    def on_launch(self) -> None:
        self.aim = self._newest = -1

    def hold_steps(self, steps: Collection[int]) -> None:
        """Record the steps that the disks of all nodes of a launch hold. They replace all steps recorded before."""
        self._kept, self._is_known = tuple(sorted(steps))[-self.limits.keep :], True

    def tick(self, now: float, floor: int, beats: Collection[Beat]) -> bool:
        """Record which nodes have written the step that they were told to. Return whether nodes must be sent a new aim.
        The next step to write is `floor`, the newest good floor in memory."""
        if not self.limits.path:
            return False
        if self.aim >= 0 and all(beat.disk_tried >= self.aim for beat in beats):
            failed = ", ".join(sorted(beat.node for beat in beats if beat.disked != self.aim))
            where = f"step {self.aim} is not on the disks of all nodes"
            self.missed = f"{where}: {failed} could not write it" if failed else ""
            if not failed:
                self._kept = (*self._kept, self.aim)[-self.limits.keep :]
            self.aim = -1
            return True
        if self.aim >= 0 or floor <= self._newest or now < self._not_before:
            return False
        self.aim = self._newest = floor
        self._not_before = now + self.limits.every_s
        return True


def list_stored_ranks(newest: Mapping[int, int], stored: int, spared: Collection[int]) -> list[int]:
    """Return the ranks whose states the node may remove from its disk at the job's end, because storage has their
    newest state. Ranks in `spared` are kept."""
    return [rank for rank, step in newest.items() if step <= stored and rank not in spared]
