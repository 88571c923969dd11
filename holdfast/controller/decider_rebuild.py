"""Rebuilds a decider from its journal."""

from collections.abc import Iterator

import msgspec

from holdfast.core.decide.decider import Decider
from holdfast.model.event import Entry
from holdfast.ports import Journal


class RebuildError(Exception):
    """The journal differs from what this version of the decider would have decided."""


def rebuild_decider(journal: Journal, decider: Decider) -> Iterator[Entry]:
    """Step the decider through the journal, and yield each entry; RebuildError if a decision differs."""
    for entry in journal.read():
        decision = decider.step(entry.at, entry.event)
        if decision != entry.decision and _written(decision) != _written(entry.decision):
            raise RebuildError(f"entry {entry.seq} of the journal decides otherwise under this version of holdfast")
        yield entry


_written = (
    msgspec.msgpack.Encoder().encode
)  # a number that is none is not equal to itself, but to what is written of it
