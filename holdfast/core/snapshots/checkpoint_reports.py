"""Follows the nodes' reports on checkpoints on storage, and chooses which of them the journal gets."""

import msgspec

from holdfast.model.stored_checkpoint_report import MissedCheckpoint, StorageReport

NO_CHECKPOINT = "holdfast has written no checkpoint"  # the script may have
_NEWS_S = 10.0  # from one entry in the journal to the next at least, while all goes well; as for steps


class StorageWatch:
    def __init__(self) -> None:
        self.newest: StorageReport | None = None  # None: no node has told of any storage
        self._written = (0, -1)  # generation and step
        self._missed_in = 0  # the generation that told of the checkpoint which is missed now; 0: not known
        self._told: StorageReport | None = None
        self._told_at = 0.0

    def continue_from(self, report: StorageReport | None) -> None:
        """Start from the report that an earlier controller wrote to the journal."""
        self.newest = self._told = report

    def on_told(self, at: float, generation: int, stored: int, missed: MissedCheckpoint | None) -> None:
        """Record the newest checkpoint that a generation has stored, and when that was (`at`). Also record a checkpoint
        that failed (`missed`), if it is of a later step."""
        if stored >= 0 and (generation, stored) > self._written:
            known = self.newest and self._written[0] == 0 and self.newest.step == stored  # to an earlier controller
            self._written = (generation, stored)
            self.newest = self.newest if known else StorageReport(step=stored, at=at)
        if missed and (generation, missed.step) > self._written:
            self._missed_in = generation
            self.newest = msgspec.structs.replace(self.newest or StorageReport(), missed=missed)

    def on_restored(self, generation: int, step: int) -> None:
        """Record the step that a generation goes on from. If storage has that step or a later one, storage is not
        behind the job: what an earlier generation could not write is no longer missed."""
        newest = self.newest
        if newest and newest.missed and 0 <= step <= newest.step and self._missed_in < generation:
            self.newest = msgspec.structs.replace(newest, missed=None)

    def take_news(self, now: float) -> StorageReport | None:
        """Return a report if it is worth a journal entry, else None. It is worth one when trouble begins or ends, and
        otherwise now and then."""
        newest, told = self.newest, self._told
        if newest is None or newest == told:
            return None
        turned = told is None or bool(newest.missed) != bool(told.missed)
        if not turned and now < self._told_at + _NEWS_S:
            return None
        self._told, self._told_at = newest, now
        return newest

    def cut_short(self, reached: int) -> str:
        """Record that the job ends at step `reached` without a last checkpoint. Return how far storage is behind; "" if
        it is not."""
        newest = self.newest or StorageReport()
        if reached <= newest.step:
            return ""
        why = f"the job was ended at once, at step {reached}, without a last checkpoint"
        missed = newest.missed or MissedCheckpoint(step=reached, why=why)
        self.newest = msgspec.structs.replace(newest, missed=missed)
        last = f"step {newest.step} was last written to storage" if newest.step >= 0 else NO_CHECKPOINT
        return f"the job is at step {reached}, and {last} in this run"

    def close(self, promised: int, disk: int = -1, not_after: int | None = None) -> StorageReport | None:
        """Return the report at the end of the job. `promised` is the step that nodes were to write. `disk` is the
        newest step on nodes' local disks, or -1. States after the step `not_after` are in doubt."""
        newest = self.newest
        if newest and not_after is not None and newest.step > not_after:
            newest = msgspec.structs.replace(newest, doubted=True)
        if newest and not newest.missed and newest.step < promised:
            why = f"nobody has told that step {promised} was written"
            newest = msgspec.structs.replace(newest, missed=MissedCheckpoint(step=promised, why=why))
        if disk > (newest.step if newest else -1):
            newest = msgspec.structs.replace(newest or StorageReport(), disk=disk)
        return newest
