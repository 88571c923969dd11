"""The supervisor's note that the controller before ended because the disk of the run was full."""

import contextlib

import msgspec

from holdfast.decoding import from_json
from holdfast.wire.run_and_node_specs import FullDiskNote

_NONE = FullDiskNote(path="", until=0.0)


def read_full_disk(note: bytes, alive_at: float) -> FullDiskNote:
    """Return the note if it tells of the time since the controller before was last alive; else one without a path."""
    with contextlib.suppress(msgspec.DecodeError):
        told = from_json(note, FullDiskNote) if note else _NONE
        return told if alive_at and told.until >= alive_at else _NONE
    return _NONE
