"""The state that goes from memory to storage when a job ends: the newest step that all ranks hold.

A newer step in doubt is written as well, since a person may want to look at it. It goes to a separate place, so that
no restart uses it and no good checkpoint is replaced.
"""

from collections.abc import Collection, Mapping

from holdfast.model.job_and_seats import Seat
from holdfast.model.node_errands import FinalState
from holdfast.model.state_copy import Copy

_LEAST = 0.5  # of the time is for storage, however long ranks took to end


def choose_final(
    copies: Mapping[str, Collection[Copy]],
    seats: Collection[Seat],
    stored: int,
    not_after: int | None,
    *,
    verified: bool = False,
) -> dict[str, tuple[FinalState, ...]]:
    """Return the states that each node must write: the newest good state first, then a newer state in doubt. Storage
    has all good steps up to `stored`, so the good state is left out if it is not newer. A node can write the states of
    its own ranks only, not the copies that it keeps for other nodes."""
    owners = {rank: seat.node for seat in seats for rank in seat.ranks}
    own = {
        node: [copy for copy in held if owners.get(copy.rank, node) == node] for node, held in sorted(copies.items())
    }
    whole = _find_whole(own, disk=False)
    good = [one for one in whole if not any(_is_doubted(copy, not_after, verified) for copy in one[1].values())]
    found: dict[str, tuple[FinalState, ...]] = {}
    if not_after is not None and stored > not_after:
        stored = -1  # it is in doubt itself, and nobody knows what was stored before it
    if good and good[-1][0] > stored:
        _add_step(found, *good[-1], doubted=False)
    if whole and whole[-1] not in good:
        _add_step(found, *whole[-1], doubted=True)
    return found


def newest_on_disks(copies: Mapping[str, Collection[Copy]]) -> int:
    """Return the newest step for which the nodes' disks together hold every rank's state; -1 if there is none."""
    return max((step for step, _ in _find_whole(copies, disk=True)), default=-1)


def _find_whole(copies: Mapping[str, Collection[Copy]], *, disk: bool) -> list[tuple[int, dict[int, Copy]]]:
    """Return the steps, oldest first, that all ranks hold in memory or on disk, with their copies by rank."""
    held: dict[tuple[int, int], dict[int, Copy]] = {}  # by step and world
    for one in (copy for node in sorted(copies) for copy in copies[node] if copy.whole and copy.disk is disk):
        held.setdefault((one.step, one.world), {})[one.rank] = one
    return [(step, ranks) for (step, world), ranks in sorted(held.items()) if ranks.keys() == set(range(world))]


def describe_doubt(found: Mapping[str, Collection[FinalState]], not_after: int) -> str:
    """Return in words which states are in doubt, and where the newest good state and the newest state in doubt are
    written."""
    of = f"states after step {not_after}" if not_after >= 0 else "all states since the newest launch"
    states = {state.doubted: state.step for node in found.values() for state in node}
    good = f"step {states[False]}, the newest good one, goes to storage" if False in states else ""
    bad = f"step {states[True]} goes to storage apart from the others" if True in states else ""
    return "; ".join(part for part in (f"{of} are in doubt", good or "no newer good one is in memory", bad) if part)


def storage_time_s(last_s: float, took_s: float) -> float:
    """Return how long storage may take. Ranks took `took_s` of the `last_s` seconds to end, and storage gets the rest,
    but at least a fixed part of `last_s`."""
    return max(last_s - took_s, last_s * _LEAST)


def _is_doubted(copy: Copy, not_after: int | None, verified: bool) -> bool:
    if copy.poisoned:
        return True
    return not_after is not None and (copy.step > not_after or (verified and not copy.verified))


def _add_step(found: dict[str, tuple[FinalState, ...]], step: int, ranks: dict[int, Copy], *, doubted: bool) -> None:
    for node in sorted({copy.node for copy in ranks.values()}):
        own = tuple(sorted(rank for rank, copy in ranks.items() if copy.node == node))
        found[node] = (*found.get(node, ()), FinalState(step=step, ranks=own, doubted=doubted))
