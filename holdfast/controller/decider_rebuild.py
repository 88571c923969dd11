"""From a journal back to the decider that wrote it."""

from collections.abc import Iterator

import msgspec

from holdfast.core.decide.decider import Decider
from holdfast.model.event import Entry
from holdfast.ports import Journal


class RebuildError(Exception):
    """The journal says something else than this version of the decider would have decided."""


def rebuild_decider(journal: Journal, decider: Decider) -> Iterator[Entry]:
    """Bring the decider to where the journal ends, entry by entry."""
    for entry in journal.read():
        decision = decider.step(entry.at, entry.event)
        if decision != entry.decision and _written(decision) != _written(entry.decision):
            raise RebuildError(f"entry {entry.seq} of the journal decides otherwise under this version of holdfast")
        yield entry


_written = (
    msgspec.msgpack.Encoder().encode
)  # a number that is none is not equal to itself, but to what is written of it
