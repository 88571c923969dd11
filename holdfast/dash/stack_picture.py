"""The stacks of all ranks as one tree, with the set of ranks in each frame, for the page to draw as a flame graph."""

from typing import Any

import msgspec

from holdfast.core.diagnose.blocking_ranks import BlockingRanks
from holdfast.core.diagnose.stack_tree import StackBranch, grow_tree
from holdfast.core.rank_ranges import format_ranks
from holdfast.dash.page_source import SourceError
from holdfast.model.rank_traces import Trace


class FlameBox(msgspec.Struct, frozen=True, kw_only=True):
    frame: str
    ranks: str  # as a set in words: "ranks 0-6 and 8"
    count: int
    named: bool  # all of them are among those that the others wait for
    above: tuple["FlameBox", ...] = ()


class StackPicture(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    reason: str  # whom the others wait for, or why nobody is named
    boxes: tuple[FlameBox, ...]
    ranks: int
    untold: tuple[str, ...]  # nodes that did not answer, and why


class _Stacks(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the controller's answer that are drawn."""

    at: float
    naming: BlockingRanks
    traces: tuple[Trace, ...]


def draw_stacks(answer: Any) -> StackPicture:
    try:
        found = msgspec.convert(answer, _Stacks)
    except msgspec.ValidationError as e:
        raise SourceError(f"the controller's stacks cannot be read: {e}") from None
    root = grow_tree(process for trace in found.traces for process in trace.processes)
    return StackPicture(
        at=found.at,
        reason=found.naming.reason,
        boxes=_draw_boxes(root, frozenset(found.naming.ranks)),
        ranks=len(set(root.ranks)),
        untold=tuple(f"{trace.node}: {trace.error}" for trace in found.traces if trace.error),
    )


def _draw_boxes(branch: StackBranch, named: frozenset[int]) -> tuple[FlameBox, ...]:
    below = sorted(branch.below.values(), key=lambda one: (-len(one.ranks), one.frame))
    return tuple(
        FlameBox(
            frame=one.frame,
            ranks=format_ranks(sorted(set(one.ranks))),
            count=len(one.ranks),
            named=bool(named) and named.issuperset(one.ranks),
            above=_draw_boxes(one, named),
        )
        for one in below
    )
