"""The stacks of a live job as the page draws them: those of all ranks in one picture, or those of one rank."""

from typing import Any

import msgspec

from holdfast.core.diagnose.blocking_ranks import BlockingRanks, acquit_within_step, training_processes
from holdfast.core.diagnose.stack_folding import fold_stack, main_frames
from holdfast.core.diagnose.stack_outline import outline_stacks
from holdfast.dash.page_source import SourceError
from holdfast.model.rank_traces import Collective, Flight, Process, StackRow, Trace

_SHOWN_GROUPS = 8  # process groups of one rank, those that it entered last


class StackPicture(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    reason: str  # whom the others wait for, or why nobody is named
    rows: tuple[StackRow, ...]
    ranks: int
    untold: tuple[str, ...]  # nodes that did not answer, and why


class CollectivePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank is in one of its process groups."""

    group: str
    op: str
    number: int
    inside: bool  # it has entered this collective and not ended it
    since_s: float  # it entered so long before the look


class RankStack(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's process as a look found it."""

    rank: int
    state: str  # as the kernel tells it
    frames: tuple[str, ...]  # of the main thread, outermost first
    absence: str  # why there are none
    collectives: tuple[CollectivePlace, ...]


class _Stacks(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the controller's answer that are drawn."""

    at: float
    naming: BlockingRanks
    traces: tuple[Trace, ...]
    usual_step_s: float = 0.0
    since_step_s: float = 0.0


def draw_stacks(answer: Any) -> StackPicture:
    """Return the picture of all ranks. Raise SourceError if the controller's answer is none."""
    found = _read_stacks(answer)
    named = acquit_within_step(found.naming, found.usual_step_s, found.since_step_s)
    return StackPicture(
        at=found.at,
        reason=named.reason,
        rows=outline_stacks(found.traces, named.ranks),
        ranks=len(training_processes(found.traces)),
        untold=tuple(f"{trace.node}: {trace.error}" for trace in found.traces if trace.error),
    )


def draw_rank(answer: Any, rank: int) -> RankStack:
    """Return one rank's stack and collectives. Raise SourceError if the answer tells nothing of the rank."""
    found = _read_stacks(answer)
    process = training_processes(found.traces).get(rank)
    if process is None:
        untold = "; ".join(trace.error for trace in found.traces if trace.error)
        raise SourceError(f"no process of rank {rank} was found{f' ({untold})' if untold else ''}")
    flight = next((flight for trace in found.traces for flight in trace.flights if flight.rank == rank), None)
    return RankStack(
        rank=rank,
        state=process.state,
        frames=fold_stack(main_frames(process)),
        absence=_absence_text(process),
        collectives=tuple(_place_collective(one, found.at) for one in _newest_groups(flight)) if flight else (),
    )


def _read_stacks(answer: Any) -> _Stacks:
    try:
        return msgspec.convert(answer, _Stacks)
    except msgspec.ValidationError as e:
        raise SourceError(f"the controller's stacks cannot be read: {e}") from None


def _absence_text(process: Process) -> str:
    return "" if main_frames(process) else process.error or "its main thread has no frames"


def _newest_groups(flight: Flight) -> list[Collective]:
    return sorted(flight.groups, key=lambda one: -one.at)[:_SHOWN_GROUPS]


def _place_collective(one: Collective, at: float) -> CollectivePlace:
    return CollectivePlace(
        group=one.group,
        op=one.op,
        number=one.entered,
        inside=one.entered > one.completed,
        since_s=max(0.0, at - one.at) if one.at else 0.0,
    )
