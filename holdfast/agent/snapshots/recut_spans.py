"""Tells for which ranks a snapshot or copy stands when a state is cut anew for another number of ranks."""

import msgspec

from holdfast.agent.snapshots.keeper_interfaces import KeeperNotes
from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.checkpoint.image_recut import RankSpan, find_cut_span
from holdfast.decoding import from_msgpack
from holdfast.model.state_copy import Copy
from holdfast.wire.rank_keeper_messages import layout_file_name


class RecutSpans:
    """Reads the layouts that this node has notes of, and remembers what each of them can be cut for."""

    def __init__(self, notes: KeeperNotes) -> None:
        self._notes = notes
        self._known: dict[tuple[int, str], RankSpan | None] = {}  # by rank and layout

    def complete_copy(self, copy: Copy) -> Copy:
        """Return the copy with the ranks whose shares can be cut out of it; unchanged if its layout is not known."""
        span = self._find_span(copy.rank, copy.layout)
        if span is None:
            return copy
        return msgspec.structs.replace(copy, cuts=span if copy.whole else (copy.rank, 1, 1))

    def _find_span(self, rank: int, layout: str) -> RankSpan | None:
        if (rank, layout) not in self._known:
            try:
                found = from_msgpack(self._notes.read_note(layout_file_name(rank, layout)), ImageLayout)
            except (OSError, msgspec.DecodeError):
                return None
            fits = found.rank == rank and found.digest.hex().startswith(layout)
            self._known[rank, layout] = find_cut_span(found) if fits else None
        return self._known[rank, layout]
