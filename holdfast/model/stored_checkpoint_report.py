"""What is known of a job's storage: its newest checkpoint, and a later one that could not be written."""

import msgspec

from holdfast.model.message_bounds import Number


class MissedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A step that should be on storage but could not be written. No later step was written either."""

    step: Number
    why: str  # a sentence that names the step


class StorageReport(msgspec.Struct, frozen=True, kw_only=True, tag="storage"):
    """The newest checkpoint on storage, and a later one that could not be written, if any."""

    step: int = -1  # -1: nothing was written in this run
    at: float = 0.0  # when that was, by its writer; or when it was told
    missed: MissedCheckpoint | None = None  # since then
    doubted: bool = False  # at the end: the loss went wrong after an earlier step, so no run resumes from this one
    disk: int = -1  # at the end: a newer step that lies on the disks of nodes, for all ranks; -1: none does
