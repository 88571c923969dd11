"""Chooses the state that another number of ranks has saved in memory, to be cut anew for the ranks of a launch.

A state can be cut anew if every byte of it is held somewhere. What a backup of a rank lacks, other ranks own. So of
each old rank either a copy must be held, or the whole state of a replica that stands for it. Each copy tells for which
ranks it stands: a copy whose layout is not recorded, or cannot be cut, stands for none.
"""

from collections.abc import Collection, Iterable

import msgspec

from holdfast.core.rank_ranges import format_ranks
from holdfast.core.snapshots.lineage import Line, find_maker, is_of_line, list_heads
from holdfast.core.snapshots.restore_choice import to_kept
from holdfast.model.job_and_seats import Seat, world_size
from holdfast.model.restore_sources import Restore
from holdfast.model.state_copy import Copy

_MOST_RANKS = 1 << 20  # of a number of ranks that is believed


def choose_recut(
    seats: tuple[Seat, ...], copies: Collection[Copy], not_after: int | None, line: Line, other: Restore
) -> Restore:
    """Return the plan to cut anew the newest whole state in memory that another number of ranks has saved. Return
    `other` if its step is not older. If it restores nothing, it then says why the newest such state cannot be cut anew.
    With `not_after`, use only verified copies of that step or older ones."""
    world = world_size(seats)
    usable = [c for c in copies if _is_other(c, world) and (not_after is None or (c.verified and c.step <= not_after))]
    plans = [other]
    for head in list_heads(line, {copy.generation for copy in usable}):
        mine = [copy for copy in usable if is_of_line(line, head, copy.generation, copy.step)]
        if plan := _choose_whole(world, mine):
            plans.append(msgspec.structs.replace(plan, maker=find_maker(line, head, plan.step)))
    best = max(plans, key=lambda plan: plan.step if plan.is_held else -1)
    newest = max(usable, key=lambda copy: copy.step, default=None)
    if best is not other or newest is None or other.is_held:
        return best
    return msgspec.structs.replace(other, uncut=_describe_lack(world, newest, usable))


def _is_other(copy: Copy, world: int) -> bool:
    """Return whether this is a sound copy in memory of a state that another number of ranks has saved."""
    known = 0 <= copy.rank < copy.world <= _MOST_RANKS and copy.world != world
    return known and not copy.poisoned and not copy.disk


def _choose_whole(world: int, copies: list[Copy]) -> Restore | None:
    """Return the plan for the newest step of which everything is held; None if there is no such step."""
    groups: dict[tuple[int, int], list[Copy]] = {}
    for copy in copies:
        groups.setdefault((copy.step, copy.world), []).append(copy)
    for step, saved_by in sorted(groups, reverse=True):
        held = groups[step, saved_by]
        if not _find_missing(saved_by, held):
            return Restore(
                step=step,
                cut_from=saved_by,
                kept=tuple(dict.fromkeys(to_kept(copy) for copy in held if copy.cuts)),
                reason=f"restoring step {step}, which {saved_by} ranks have saved: it is cut anew for {world}",
            )
    return None


def _find_missing(world: int, held: Iterable[Copy]) -> list[int]:
    """Return the old ranks for which nothing stands that is held."""
    cut = [copy for copy in held if copy.cuts]
    whole = {copy.rank for copy in cut if copy.whole}
    own = {copy.rank for copy in cut if copy.half < 0} | _decodable(cut, whole)
    spans = {copy.cuts for copy in cut if copy.cuts and copy.whole}
    ranges = [range(first, first + stride * count, stride) for first, stride, count in spans if stride > 0 < count]
    return [rank for rank in range(world) if rank not in own and not any(rank in span for span in ranges)]


def _decodable(cut: list[Copy], whole: set[int]) -> set[int]:
    """Return the ranks of whose shares both parity halves can be decoded with other ranks' whole states."""
    halves = {(copy.rank, copy.half) for copy in cut if copy.beside in whole}
    return {rank for rank, half in halves if half == 0 and (rank, 1) in halves}


def _describe_lack(world: int, newest: Copy, copies: list[Copy]) -> str:
    """Return in one sentence why the newest state of another number of ranks cannot be cut anew."""
    held = [copy for copy in copies if (copy.step, copy.world) == (newest.step, newest.world)]
    missing = _find_missing(newest.world, held)
    unknown = sorted({copy.rank for copy in held if not copy.cuts} & set(missing))
    why = "no lineage of the job has all of it"
    if unknown:
        why = f"the layout of what {format_ranks(unknown)} had is not recorded, or cannot be cut"
    elif missing:
        why = f"nothing is held of {format_ranks(missing)}"
    ranks = f"{newest.world} ranks" if newest.world > 1 else "1 rank"
    return f"step {newest.step} in memory was saved by {ranks} and cannot be cut anew for {world}: {why}"
