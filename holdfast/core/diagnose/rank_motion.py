"""What ranks and their children did between two traces of a job."""

from collections.abc import Sequence

import msgspec

from holdfast.core.diagnose.stack_folding import main_frames
from holdfast.model.rank_traces import Trace


class RankMotion(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank and its children did between two traces."""

    cpu_s: float = 0.0
    io_bytes: int = 0
    frames: bool = False  # a main thread is at another place, or on another line
    collectives: int = 0  # and messages, that the rank or its GPU came to


def find_motion(before: Sequence[Trace], after: Sequence[Trace]) -> dict[int, RankMotion]:
    """Return what each rank and its children did between two traces. A new or ended process counts as a new stack."""
    then = {(p.node, p.pid): p for trace in before for p in trace.processes}
    now = {(p.node, p.pid): p for trace in after for p in trace.processes}
    found: dict[int, RankMotion] = {}
    came = _count_collectives(after)
    for rank, count in _count_collectives(before).items():
        found[rank] = RankMotion(collectives=max(0, came.get(rank, count) - count))
    for key in sorted(then.keys() | now.keys()):
        old, new = then.get(key), now.get(key)
        known = new or old
        assert known is not None
        so_far = found.get(known.rank, RankMotion())
        found[known.rank] = msgspec.structs.replace(
            so_far,
            cpu_s=so_far.cpu_s + (new.cpu_s if new else 0.0) - (old.cpu_s if old and new else 0.0),
            io_bytes=so_far.io_bytes + (new.io_bytes if new else 0) - (old.io_bytes if old and new else 0),
            frames=so_far.frames or old is None or new is None or main_frames(old) != main_frames(new),
        )
    return found


def _count_collectives(traces: Sequence[Trace]) -> dict[int, int]:
    """Return for each rank how many collectives and messages it has entered, plus how many its GPU has begun."""
    return {
        f.rank: sum(c.entered + (c.started or 0) for c in f.groups)
        + sum(c.posted + (c.begun or 0) for c in f.channels or ())
        for trace in traces
        for f in trace.flights
    }
