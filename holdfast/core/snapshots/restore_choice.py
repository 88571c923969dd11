"""Chooses the step to restore: the newest one that every rank can get from memory or a local disk of some node.

Memory comes before disk, and the rank's own node before other nodes. A parity half is usable only together with the
state that it was XORed with. Checkpoints on storage are not considered, because they are older. A rank that gets
nothing from memory looks for a checkpoint by itself.
"""

from collections.abc import Collection, Iterable

import msgspec

from holdfast.core.rank_ranges import format_ranks
from holdfast.core.snapshots.lineage import Line, find_maker, is_of_line, list_heads
from holdfast.model.action import Launch
from holdfast.model.job_and_seats import Seat, world_size
from holdfast.model.restore_sources import Restore, Source
from holdfast.model.state_copy import KEPT_DIGITS, Copy, CopySummary
from holdfast.model.state_doubt import Doubt

_NAMED = 4  # steps at which ranks were that a sentence names


def choose_restore(seats: tuple[Seat, ...], copies: Iterable[Copy], not_after: int | None = None) -> Restore:
    """Return the plan to restore the newest step that every rank can get. With `not_after`, use only verified copies of
    that step or older ones."""
    world = world_size(seats)
    usable = [c for c in copies if c.world == world and not c.poisoned and 0 <= c.rank < world]
    if not_after is not None:
        usable = [c for c in usable if c.verified and c.step <= not_after]
    for step in sorted({c.step for c in usable}, reverse=True):
        held = tuple(c for c in usable if c.step == step)
        sources = _find_sources(seats, held)
        if sources is not None:
            return Restore(
                step=step,
                sources=sources,
                kept=tuple(dict.fromkeys(map(to_kept, held))),  # memory and disk of a node may both hold it
                reason=_restore_reason(step, sources),
            )
    why = "no step is held for every rank" if usable else "no snapshots are held"
    apart = _describe_apart(world, usable) if not_after is None else ""
    return Restore(reason=f"nothing to restore from memory: {why}", apart=apart)


def _describe_apart(world: int, copies: list[Copy]) -> str:
    """Return in words which ranks have which step as their newest, from the highest step down. Return "" if some rank
    has no usable copy at all."""
    newest = {c.rank: c.step for c in sorted(copies, key=lambda c: c.step)}
    if len(newest) < world:
        return ""
    steps = sorted(set(newest.values()), reverse=True)
    told = [f"{format_ranks([r for r in newest if newest[r] == step])}: step {step}" for step in steps]
    return ", ".join([*told[:2], "...", told[-1]] if len(told) > _NAMED else told)


def choose_known_restore(
    seats: tuple[Seat, ...],
    copies: Collection[Copy],
    known: Collection[str],
    not_after: int | None = None,
    line: Line = (),
) -> Restore:
    """Return the restore plan from copies on `known` nodes, which have or had seats. Copies on other nodes are used
    only if the known nodes yield no plan, because any host that was let in could claim a newer step and send a forged
    state."""
    plan = _choose_of_lines(seats, [copy for copy in copies if copy.node in known], not_after, line)
    return plan if plan.sources else _choose_of_lines(seats, copies, not_after, line)


def _choose_of_lines(seats: tuple[Seat, ...], copies: Collection[Copy], not_after: int | None, line: Line) -> Restore:
    """Return the plan to restore the newest step that all ranks can get within one lineage. The job must be able to go
    on with that lineage. Copies in memory may name no generation: older agents send these, and have dropped other
    lineages already."""
    plans = []
    for head in list_heads(line, {copy.generation for copy in copies}):
        mine = [
            copy
            for copy in copies
            if not (copy.generation or copy.disk) or is_of_line(line, head, copy.generation, copy.step)
        ]
        plan = choose_restore(seats, mine, not_after)
        plans.append(msgspec.structs.replace(plan, maker=find_maker(line, head, plan.step)) if plan.sources else plan)
    return max(plans, key=lambda plan: plan.step if plan.sources else -1)


def choose_replicated(seats: tuple[Seat, ...], copies: Collection[Copy], line: Line, other: Restore) -> Restore:
    """Return the plan to restore a state that every rank holds whole, in a world of any size. Return `other` if its
    step is not older.

    Nodes that hold a state have as many whole states of the step as they have ranks. The step is the newest one that
    all these nodes hold within one lineage. A node without a state gets it from the ranks of another node.
    """
    plans = [other]
    for head in list_heads(line, {copy.generation for copy in copies}):
        held: dict[str, dict[tuple[int, int], set[int]]] = {seat.node: {} for seat in seats}
        for copy in copies:
            usable = copy.whole and not (copy.disk or copy.poisoned) and copy.node in held
            if usable and is_of_line(line, head, copy.generation, copy.step):
                held[copy.node].setdefault((copy.step, copy.world), set()).add(copy.rank)
        steps = [
            {step for (step, _), ranks in held[seat.node].items() if len(ranks) >= seat.nproc}
            for seat in seats
            if held[seat.node]
        ]
        if steps and (common := set.intersection(*steps)):
            step = max(common)
            reason = f"restoring step {step} on {len(steps)} of {len(seats)} nodes from own memory"
            plans.append(Restore(step=step, maker=find_maker(line, head, step), replicated=True, reason=reason))
    return max(plans, key=lambda plan: plan.step if plan.is_held else -1)


def _find_sources(seats: tuple[Seat, ...], copies: tuple[Copy, ...]) -> tuple[Source, ...] | None:
    """Return a source for every rank; None if a rank has none."""
    sources = []
    for seat in seats:
        for rank in seat.ranks:
            source = _find_source(rank, seat.node, copies)
            if source is None:
                return None
            sources.append(source)
    return tuple(sources)


def _find_source(rank: int, node: str, copies: tuple[Copy, ...]) -> Source | None:
    in_memory = _find_in_memory(rank, node, tuple(c for c in copies if not c.disk), {c.rank for c in copies if c.whole})
    disks = sorted({c.node for c in copies if c.rank == rank and c.disk})
    if in_memory or not disks:
        return in_memory
    own = node in disks
    return Source(rank=rank, own=own, nodes=(node,) if own else tuple(disks), disk=True)


def _find_in_memory(rank: int, node: str, copies: tuple[Copy, ...], anywhere: set[int]) -> Source | None:
    """Return a source of the rank's state in memory. `anywhere` has the ranks whose state is whole on some node."""
    mine = [c for c in copies if c.rank == rank]
    if any(c.node == node and c.whole for c in mine):
        return Source(rank=rank, own=True, nodes=(node,))
    whole = sorted({c.node for c in mine if c.whole})
    if whole:  # it moved, and its old node still answers
        return Source(rank=rank, own=False, nodes=tuple(whole))
    # What a backup lacks other ranks hold too: as each of them has a source at this step, all of it can be had.
    partial = {c.node for c in mine if c.half < 0} or _parity_keepers(mine, anywhere)
    return Source(rank=rank, own=False, nodes=tuple(sorted(partial, key=lambda n: (n != node, n)))) if partial else None


def _parity_keepers(mine: list[Copy], whole: set[int]) -> set[str]:
    """Return the keepers of a share's two halves; empty unless both can be decoded with other ranks' states."""
    usable = [c for c in mine if c.beside in whole]
    return {c.node for c in usable} if {c.half for c in usable} == {0, 1} else set()


def to_kept(copy: Copy) -> CopySummary:
    """Return the short form of a copy."""
    return CopySummary(
        copy.rank, copy.node, copy.whole, copy.layout[:KEPT_DIGITS], copy.half, copy.beside, copy.generation
    )


def _restore_reason(step: int, sources: tuple[Source, ...]) -> str:
    own = sum(s.own for s in sources if not s.disk)
    disk = sum(s.disk for s in sources)
    peers = len(sources) - own - disk
    parts = [f"{own} from own memory"] * bool(own) + [f"{peers} from peers"] * bool(peers)
    parts += [f"{disk} from local disks"] * bool(disk)
    return f"restoring step {step}: {', '.join(parts)}"


def leave_out_disks(copies: Iterable[Copy], left: Collection[Doubt]) -> list[Copy]:
    """Return the copies, except copies on disk that the doubts in `left` ban."""
    return [c for c in copies if not (c.disk and any(doubt.bans_state(c.generation, c.step) for doubt in left))]


def newest_doubted(launch: Launch, copies: Iterable[Copy], stored: int, before: int) -> int:
    """Return the newest step of which there is a copy, or a checkpoint on storage, that this launch may not restore
    because it is in doubt; -1 if there is none or a person does not mind. `stored` is the newest checkpoint that nodes
    have reported, and `before` is what this function returned for the launch before."""
    if launch.from_zero:
        return -1
    world, least = world_size(launch.seats), launch.not_after
    steps = [
        copy.step
        for copy in copies
        if copy.world == world
        and (
            (least is not None and copy.step > least)
            or (launch.verified and not copy.verified)
            or any(doubt.bans_state(copy.generation, copy.step) for doubt in launch.doubts)
        )
    ]
    return max((*steps, before, stored if least is not None and stored > least else -1))


def steps_on_disks(seats: Collection[Seat], copies: Iterable[Copy], not_after: int) -> set[int]:
    """Return the steps up to `not_after` that every seated node has on its own disk for all of its own ranks."""
    world = sum(seat.nproc for seat in seats)
    found = {(c.node, c.rank, c.step) for c in copies if c.disk and c.world == world and c.step <= not_after}
    own = [(seat.node, seat.first_rank + local) for seat in seats for local in range(seat.nproc)]
    return {step for _, _, step in found if all((node, rank, step) in found for node, rank in own)}


def count_disks(plan: Restore) -> int:
    """Return the number of nodes from whose disks ranks get their states."""
    return len({source.nodes[0] for source in plan.sources if source.disk})


def advise_apart(apart: str) -> str:
    """Return a sentence on why no snapshot in memory can be restored, and on the two possible causes."""
    why = f"no state in memory can be restored, as no step is held for every rank ({apart})"
    script = "ranks do not make and save() the same steps together: then have each step wait for all, as DDP's does"
    return f"{why}; either copies on peers were behind, or {script}"
