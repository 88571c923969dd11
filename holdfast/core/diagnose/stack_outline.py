"""The stacks of all ranks in a bounded number of rows, for the journal and the page: frames, and who is in each.

A hang is over when its ranks end, and their stacks are gone then. So the alarm of a hang keeps them. Ranks at one place
share rows, so even many thousand ranks take few rows. If there are too many places, rows of the named ranks are kept
first, then those of the most ranks, and one row counts what is left out.
"""

from collections.abc import Collection, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count

import msgspec

from holdfast.core.diagnose.blocking_ranks import STOPPED, training_processes
from holdfast.core.diagnose.stack_folding import Folded, fold_stack, main_frames
from holdfast.core.diagnose.stack_tree import StackBranch, merge_stacks, sort_branches
from holdfast.core.rank_ranges import format_ranks
from holdfast.model.detector_alarm import Alarm, Stance
from holdfast.model.rank_traces import Frame, Process, StackRow, Trace

OUTLINE_BYTES = 32 << 10
LEFT_OUT = "…"  # the frame of a row that counts ranks whose further frames are left out
_FRAME_CHARS = 200
_ROW_BYTES = 32  # of a row, without its texts, and of one that counts what is left out below
_STOPPED_FRAME = "stopped by a signal"


def keep_stacks(alarm: Alarm, traces: Sequence[Trace], blocking: Collection[int]) -> Alarm:
    """Return the alarm with the stacks that it was raised for. `blocking` are marked if the alarm names no ranks. An
    alarm that only notes a pause stays small: a job that pauses every few minutes would fill its journal."""
    if alarm.stance is Stance.OBSERVE and not alarm.ranks:
        return alarm
    return msgspec.structs.replace(alarm, stacks=outline_stacks(traces, alarm.ranks or blocking))


def outline_stacks(
    traces: Sequence[Trace], named: Collection[int] = (), limit_bytes: int = OUTLINE_BYTES
) -> tuple[StackRow, ...]:
    """Return the merged stacks of all ranks: each frame before the frames that it calls, larger branches first."""
    by_place: dict[tuple[tuple[Frame, ...], str, str], tuple[Process, list[int]]] = {}
    for rank, process in sorted(training_processes(traces).items()):
        place = main_frames(process), process.state if process.state in STOPPED else "", process.error
        by_place.setdefault(place, (process, []))[1].append(rank)
    root = merge_stacks((ranks, _shown_stack(process)) for process, ranks in by_place.values())
    suspects = frozenset(named)
    return tuple(_list_rows(root, 0, _choose_branches(root, suspects, limit_bytes), suspects))


def _shown_stack(process: Process) -> Folded:
    """Return a stack whose last frame also says that the process is stopped, or why there are no frames."""
    folded = fold_stack(main_frames(process))
    if process.state in STOPPED:
        return (*folded, f"{_STOPPED_FRAME}{f', in {folded[-1]}' if folded else ''}")
    return folded or (f"no stack: {process.error or 'its main thread has no frames'}",)


def _choose_branches(root: StackBranch, named: frozenset[int], limit_bytes: int) -> set[int]:
    """Return the ids of the branches that fit: those of named ranks first, then the largest."""
    kept: set[int] = set()
    ahead: list[tuple[bool, int, int, StackBranch]] = []
    numbers = count()  # among equals the branch found first

    def reach(branch: StackBranch) -> None:
        kept.add(id(branch))
        for below in branch.below.values():
            heappush(ahead, (named.isdisjoint(below.ranks), -len(below.ranks), next(numbers), below))

    reach(root)
    left = limit_bytes
    while ahead:
        *_, branch = heappop(ahead)
        texts = len(branch.frame[:_FRAME_CHARS].encode()), len(_ranks_text(branch.ranks)), len(_here_text(branch))
        left -= sum(texts) + _ROW_BYTES
        if left < 0:
            break
        reach(branch)
    return kept


def _list_rows(branch: StackBranch, depth: int, kept: set[int], named: frozenset[int]) -> Iterator[StackRow]:
    left_out = 0
    for below in sort_branches(branch):
        if id(below) not in kept:
            left_out += len(below.ranks)
            continue
        yield StackRow(
            depth=depth,
            frame=below.frame[:_FRAME_CHARS],
            ranks=_ranks_text(below.ranks),
            count=len(below.ranks),
            named=bool(named) and named.issuperset(below.ranks),
            here=_here_text(below),
        )
        yield from _list_rows(below, depth + 1, kept, named)
    if left_out:
        yield StackRow(depth=depth, frame=LEFT_OUT, count=left_out)


def _here_text(branch: StackBranch) -> str:
    return _ranks_text(branch.here) if branch.here and branch.below else ""


def _ranks_text(ranks: Sequence[int]) -> str:
    return format_ranks(sorted(set(ranks)))
