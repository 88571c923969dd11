"""Names the ranks that block a job, from the stacks of all its processes and the collectives they entered.

There are three kinds of evidence, the surest first. The kernel says which processes are stopped or gone. Sequence
numbers of collectives show which rank other ranks wait for while it waits for nobody. They also show a GPU that has not
begun a collective which its process has entered. If all ranks wait in a circle, the circle is named, or those few of
its ranks that most ranks wait for. Stacks show ranks that are at another place in the code than most ranks.

The answer may be that no rank blocks the job. If all ranks are at one place, or all GPUs are in one collective, the
network or the code is at fault. If a few ranks are ahead and most ranks are behind them, nobody is named. The status of
NCCL's RAS is shown as well, but it names nobody.

Do not use `find_blocking` on a running job: records of different ranks are up to a second apart, and some rank is
always last. Call it repeatedly, and let `vote_rounds` find the rank that is named again and again.
"""

from collections import Counter
from collections.abc import Sequence
from math import ceil

import msgspec

from holdfast.core.diagnose.ras_status import describe_ras
from holdfast.core.diagnose.stack_folding import (
    StackCluster,
    cluster_ranks,
    fold_stack,
    is_waiting,
    is_waiting_for_one,
    main_frames,
)
from holdfast.core.diagnose.wait_graph import (
    MissingAtCollective,
    MixedOperations,
    PassedCollective,
    UnlikeMessage,
    WaitGraph,
    build_wait_graph,
)
from holdfast.core.rank_ranges import format_ranks
from holdfast.core.snapshots.peer_placement import dense_mesh, parallel_groups
from holdfast.model.job_and_seats import Dims, Seat
from holdfast.model.rank_traces import Collective, Flight, Process, Trace

STANDING = ("stopped", "gone", "silent")  # `how` of ranks of which this is seen whatever the others do
STOPPED = ("T", "t")
GONE = ("Z", "X", "x")
_USUAL = 1.5  # times the usual time of a step, a step is not yet late
_QUEUE_S = 5.0  # a GPU's queue holds some thousand kernels: what a process has queued before a collective takes less


class BlockingRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks for which other ranks wait, and why. Empty `ranks` means that nobody is named."""

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()  # of these ranks
    group: str = ""  # the smallest parallel group that covers them, where they are on several nodes: "pp 2"
    wide: tuple[str, ...] = ()  # nodes of that group; without one, as `nodes`
    how: str = ""  # stopped, gone, silent, gpu, missing, crossed (wait for each other), apart (other place); "": nobody
    # Of crossed ranks: "circle" (of waits), "orders" (the few of a larger one that most wait for), "operations" (they
    # differ under one number), "passed" (they have ended what most are still in); "": unknown.
    deadlock: str = ""
    all: bool = False  # nobody else waits for them
    reason: str = ""
    hard: bool = False  # stopped or gone, missing from a collective while outside of any, or a GPU that is surely stuck
    clusters: tuple[StackCluster, ...] = ()


def find_blocking(traces: Sequence[Trace], seats: tuple[Seat, ...] = (), mesh: Dims = ()) -> BlockingRanks:
    """Return the ranks that the processes of a stalled job wait for. With `seats` and `mesh` the result also names
    the nodes that can be evicted together."""
    mains = training_processes(traces)
    children = [p for trace in traces for p in trace.processes if p is not mains.get(p.rank)]
    places = cluster_ranks(tuple(mains.values()))
    flights = {flight.rank: flight for trace in traces for flight in trace.flights}
    # A record may be a second old, or tell nothing of messages between two ranks: the stack knows better who waits. But
    # who waits for a message that it has posted before does so in its own code, and tells it.
    blocked = {rank for rank, main in mains.items() if is_waiting(fold_stack(main_frames(main)))}
    blocked |= {flight.rank for flight in flights.values() if flight.waits}
    waiting = build_wait_graph(tuple(flights.values()), blocked)
    silent = {trace.node: trace.error for trace in traces if trace.error}
    node_of = {s.first_rank + i: s.node for s in seats for i in range(s.nproc)} | {
        p.rank: p.node for p in mains.values()
    }
    found = (
        _by_state(mains, children)
        or _by_silence(silent, node_of, waiting)
        or _by_gpus(waiting, flights)
        or _by_waits(waiting, blocked, mains, children)
        or (None if waiting.doubted or _all_on_gpus(waiting, mains) else _by_place(places, len(mains)))
        or BlockingRanks(reason=_nobody_reason(places, waiting, mains, children, _list_ended(traces, mains, node_of)))
    )
    ras = describe_ras("\n".join(trace.ras for trace in traces), mains)
    found = msgspec.structs.replace(found, clusters=places, reason=f"{found.reason} ({ras})" if ras else found.reason)
    return _widen_suspects(found, node_of, seats, mesh) if found.ranks else found


def training_processes(traces: Sequence[Trace]) -> dict[int, Process]:
    """Return by rank the process that trains: the rank's own, or the child that makes its steps."""
    found = {p.rank: p for trace in traces for p in trace.processes if not p.child}
    return found | {p.rank: p for trace in traces for p in trace.processes if p.steps}


def vote_rounds(rounds: Sequence[BlockingRanks], margin: float = 0.4, share: float = 0.6) -> BlockingRanks:
    """Return ranks named in at least `share` of the rounds, if all other ranks are named less often by `margin`."""
    counts = Counter(rank for round in rounds for rank in round.ranks)
    often = {rank for rank, count in counts.items() if count >= max(1, ceil(share * len(rounds)))}
    runner_up = max((count for rank, count in counts.items() if rank not in often), default=0)
    if not often or min(counts[rank] for rank in often) - runner_up < margin * len(rounds):
        shown = ", ".join(f"rank {rank} {count} times" for rank, count in counts.most_common(3)) or "nobody in any"
        clusters_seen = rounds[-1].clusters if rounds else ()
        return BlockingRanks(reason=f"no rank stands out in {len(rounds)} rounds: {shown}", clusters=clusters_seen)
    last = next(r for r in reversed(rounds) if often & set(r.ranks))
    named = tuple(sorted(often))
    nodes = tuple(sorted({node for r in rounds if often.issuperset(r.ranks) for node in r.nodes}))
    counted = f"named in {min(counts[rank] for rank in often)} of {len(rounds)} rounds, others in at most {runner_up}"
    if set(last.ranks) == often:
        return msgspec.structs.replace(last, reason=f"{format_ranks(named)} {counted}: {last.reason}")
    return BlockingRanks(ranks=named, nodes=nodes, wide=nodes, how="apart", reason=f"{format_ranks(named)} {counted}")


def acquit_within_step(named: BlockingRanks, usual_s: float, since_s: float) -> BlockingRanks:
    """Return the ranks that block the job, or none if the job may be in the middle of a step. Steps usually take
    `usual_s` seconds (0: unknown), and the newest was made `since_s` seconds ago. Within a step some rank is always
    last."""
    if not (named.ranks and usual_s) or named.how in STANDING or since_s > _USUAL * usual_s:
        return named
    reason = f"the job is within a step: steps take {usual_s:.1f} s, and the newest was made {since_s:.1f} s ago"
    return BlockingRanks(reason=reason, clusters=named.clusters)


# --- witnesses -------------------------------------------------------------------------------------------------------


def _by_state(mains: dict[int, Process], children: list[Process]) -> BlockingRanks | None:
    for how, states, said in (("stopped", STOPPED, "stopped"), ("gone", GONE, "gone")):
        # Who is gone after its script has returned was about to go.
        own = {
            rank for rank, p in mains.items() if p.state in states and not p.steps and not (p.ending and how == "gone")
        }
        below = [*children, *(p for p in mains.values() if p.steps)]
        lent = {p.rank: p for p in below if p.state in STOPPED} if how == "stopped" else {}
        ranks = own | lent.keys()
        alone = len(mains) == 1 and not own  # one rank whose children train: it is not wholly stopped
        if ranks and (alone or ranks != mains.keys()):
            through = next((p for rank, p in lent.items() if rank not in own), None)
            what = f"{through.name or 'child'} (pid {through.pid}) of rank {through.rank} is stopped" if through else ""
            also = f"{format_ranks(tuple(own))} {'is' if len(own) == 1 else 'are'} {said}" if own else ""
            reason = "; ".join(part for part in (also, what) if part)
            return BlockingRanks(ranks=tuple(sorted(ranks)), how=how, hard=True, reason=reason)
        if ranks:
            return BlockingRanks(reason=f"every rank is {said}")
    return None


def _by_silence(silent: dict[str, str], node_of: dict[int, str], waiting: WaitGraph) -> BlockingRanks | None:
    """Return the ranks of nodes that did not answer. Return None if there are none, if no node answered at all, or if
    collectives name the cause."""
    ranks = tuple(sorted(rank for rank, node in node_of.items() if node in silent))
    if not ranks or waiting.outside or len(ranks) == len(node_of):
        return None
    why = "; ".join(f"{node}: {error}" for node, error in sorted(silent.items()))
    return BlockingRanks(ranks=ranks, how="silent", reason=f"{format_ranks(ranks)} could not be looked at ({why})")


def _by_gpus(waiting: WaitGraph, flights: dict[int, Flight]) -> BlockingRanks | None:
    """Return ranks that others wait for because their GPUs have not begun what their processes entered or queued.
    Return None if there are none, or if a process is waited for too. Stacks prove nothing: a process may wait for its
    GPU."""
    queued = {rank for m in waiting.missing for rank in m.queued}
    ranks = waiting.outside
    queued |= {rank for rank in ranks if rank in flights and is_gpu_stuck(flights[rank])}
    if not ranks or not queued.issuperset(ranks) or 2 * len(ranks) > waiting.told:
        return None
    busy = [one for rank in ranks for one in flights[rank].groups if is_on_gpu(one)]
    whose = "it has" if len(ranks) == 1 else "a GPU of theirs has"
    also = [f"; {whose} begun {one.started_op or 'collective'} {one.started} of group {one.group}" for one in busy[:1]]
    hard = all(is_gpu_stuck(flights[rank]) for rank in ranks)
    return BlockingRanks(ranks=ranks, how="gpu", hard=hard, reason=f"{_describe_gpus(waiting, ranks)}{''.join(also)}")


def is_gpu_stuck(flight: Flight) -> bool:
    """Return whether this rank's GPU is surely stuck. It must be in no collective or message, so it waits for no other
    GPU. It must also take longer to begin the next one than ever before, and longer than a full queue of kernels
    takes."""
    if any(map(is_on_gpu, flight.groups)) or any((c.begun or 0) > (c.ended or 0) for c in flight.channels or ()):
        return False
    ahead = [(one.unbegun_since, one.unbegun_s) for one in flight.groups]
    ahead.append((flight.unbegun_since, flight.unbegun_s))
    return any(since and flight.at - since > max(longest_s, _QUEUE_S) for since, longest_s in ahead)


def is_on_gpu(one: Collective) -> bool:
    """Return whether a collective has begun on the GPU and not ended."""
    return one.started is not None and one.started > one.completed


def _all_on_gpus(waiting: WaitGraph, mains: dict[int, Process]) -> MissingAtCollective | None:
    """Return a collective in which the GPUs of all ranks are; None if there is none. Stacks then prove nothing."""
    return next((m for m in waiting.unended if mains.keys() <= set(m.inside)), None)


def _by_waits(
    waiting: WaitGraph, blocked: set[int], mains: dict[int, Process], children: list[Process]
) -> BlockingRanks | None:
    free = [rank for rank in waiting.outside if rank not in blocked]
    if free and 2 * len(free) <= waiting.told:
        first = next(m for m in waiting.missing if set(free) & set(m.ranks))
        absent = tuple(r for r in free if r in first.ranks)
        held = {rank for m in waiting.missing for rank in m.inside} | blocked
        held -= set(free)  # of whom some wait for others
        reason = f"{_describe_missing(first, absent, len(held))}{_describe_place(free, mains, children)}"
        return BlockingRanks(ranks=tuple(free), how="missing", hard=True, reason=reason)
    # Whoever waits for somebody, but nobody knows for whom, is a part of the trouble if nobody else is.
    deadlock = "circle" if waiting.circle else "operations" if waiting.mixed else ""
    mixed = tuple(sorted({rank for m in waiting.mixed for rank in m.ranks}))
    crossed = waiting.circle or mixed or (() if free else waiting.outside)
    if 2 * len(crossed) > waiting.told > 2 and waiting.circle and (few := _waited_for_by_most(waiting)):
        crossed, deadlock = few, "orders"
    if crossed and (2 * len(crossed) <= waiting.told or len(crossed) == 2):
        reason = _describe_crossed(waiting, crossed, mains)
        everybody = len(crossed) == waiting.told
        return BlockingRanks(ranks=crossed, how="crossed", deadlock=deadlock, all=everybody, reason=reason)
    if waiting.passed:
        return _by_passing(waiting.passed[0])
    if waiting.unlike and not crossed:
        pair = (waiting.unlike[0].sent.source, waiting.unlike[0].sent.target)
        return BlockingRanks(ranks=tuple(sorted(pair)), how="crossed", reason=_describe_unlike(waiting.unlike[0]))
    return None


def _by_passing(passed: PassedCollective) -> BlockingRanks:
    """Return the ranks that ended a collective in which most still are, and whether the operations of both differ."""
    differs = passed.ended_op and passed.op and passed.ended_op != passed.op
    verb = "has" if len(passed.ranks) == 1 else "have"
    ended = f"{format_ranks(passed.ranks)} {verb} ended {passed.ended_op or 'collective'} {passed.seq}"
    others = f"{len(passed.inside)} are in {passed.op or 'it'} under that number"
    return BlockingRanks(
        ranks=passed.ranks,
        how="crossed",
        deadlock="operations" if differs else "passed",
        reason=f"{ended} of group {passed.group} and gone on; {others}",
    )


def _waited_for_by_most(waiting: WaitGraph) -> tuple[int, ...]:
    """Return the ranks that over half of all ranks wait for. They may have entered collectives in another order."""
    most = max(waiting.missing, key=lambda m: len(m.inside))
    return most.ranks if 2 * len(most.inside) > waiting.told else ()


def _by_place(places: tuple[StackCluster, ...], world: int) -> BlockingRanks | None:
    """Return the ranks that are at another place than most, or that do not wait while others do; None if no rank is.

    If all ranks wait, most of them wait for the few ranks that wait elsewhere. In a stalled pipeline, for example, they
    wait in the sum of the gradients. If ranks are split in two equal halves, nobody can say which half waits for which.
    """
    inside = {rank for c in places if c.waits for rank in c.ranks}
    outside = [c for c in places if not c.waits]
    pair = {r for c in places if c.waits and is_waiting_for_one(c.frames) for r in c.ranks}
    rest = outside if outside and inside and inside != pair else list(places[1:])
    apart = tuple(sorted(rank for c in rest for rank in c.ranks))
    halved = 2 * len(apart) == world and not (inside and outside)
    if not apart or 2 * len(apart) > world or halved:
        return None
    if not outside:
        most = f"{len(places[0].ranks)} of {world} wait in {places[0].frames[-1]}"
        return BlockingRanks(ranks=apart, how="apart", reason=f"{most}; {_describe_waits(rest)}")
    where = rest[0].frames[-1]
    others = "the others wait for them" if inside else f"most are in {places[0].frames[-1]}"
    return BlockingRanks(ranks=apart, how="apart", reason=f"{format_ranks(apart)} in {where}, {others}")


def _list_ended(traces: Sequence[Trace], mains: dict[int, Process], node_of: dict[int, str]) -> tuple[int, ...]:
    """Return the ranks whose script has returned, or that are no longer among the processes of a node that answered."""
    told = {trace.node for trace in traces if not trace.error}
    over = {rank for rank, p in mains.items() if p.ending == "returned" and not main_frames(p)}
    return tuple(sorted(over | {rank for rank, node in node_of.items() if rank not in mains and node in told}))


def _nobody_reason(
    places: tuple[StackCluster, ...],
    waiting: WaitGraph,
    mains: dict[int, Process],
    children: list[Process],
    ended: tuple[int, ...],
) -> str:
    if on_gpus := _all_on_gpus(waiting, mains):
        what = f"{on_gpus.op or 'collective'} {on_gpus.seq} of group {on_gpus.group}"
        return f"all {len(mains)} GPUs have begun {what} and none has ended it"
    if waiting.doubted:
        whose = "its GPU is" if len(waiting.doubted) == 1 else "their GPUs are"
        ahead = f"{format_ranks(waiting.doubted)} queued more messages than torch's recorder holds"
        return f"{ahead}, so nobody knows in which of them {whose}"
    if waiting.outside and 2 * len(waiting.outside) > waiting.told:
        return f"most have not come yet: {_describe_missing(waiting.missing[0], waiting.missing[0].ranks)}"
    seen = tuple(sorted(rank for place in places for rank in place.ranks))
    unread = tuple(sorted(mains.keys() - {*seen, *ended}))
    rest = f"; {format_ranks(ended)} {'has' if len(ended) == 1 else 'have'} ended" if ended else ""
    rest += f"; no stack of {format_ranks(unread)} was read" if unread else ""
    if len(places) > 1:
        return f"{len(seen)} ranks are at {len(places)} places, and no place has most of them{rest}"
    if not places:
        return f"no stacks{rest if ended else ''}"
    below = next((p for p in children if p.rank in mains and main_frames(p)), None)  # such as a worker that loads
    child = f", a child {below.name or below.pid} of rank {below.rank} in " if below else ""
    inner = fold_stack(main_frames(below)[-1:])[0] if below else ""
    who = f"all {len(seen)} ranks are" if len(seen) > 1 and not rest else f"{format_ranks(seen)} are"
    who = f"{format_ranks(seen)} is" if len(seen) == 1 else who
    return f"{who} in {places[0].frames[-1]}{child}{inner}{rest}"


# --- words and width -------------------------------------------------------------------------------------------------


def _describe_missing(m: MissingAtCollective, ranks: Sequence[int], held: int = 0) -> str:
    """Return text about a collective that `ranks` have not entered. `held` is how many ranks wait for them in all."""
    verb = "has" if len(ranks) == 1 else "have"
    what = f"{m.op or 'collective'} {m.seq} of group {m.group}"
    if ranks and set(m.queued).issuperset(ranks):
        whose = f"{format_ranks(ranks)}'s GPU has" if len(ranks) == 1 else f"the GPUs of {format_ranks(ranks)} have"
        others = f"which {'another one has' if len(m.inside) == 1 else f'{len(m.inside)} others have'} begun"
        if m.message:
            others = f"which {format_ranks(m.inside)} waits for"
        own = "its process has" if len(ranks) == 1 else "their processes have"
        return f"{whose} not begun {what}, {others}; {own} entered it"
    return f"{format_ranks(ranks)} {verb} not come to {what}; {_count_waits(held or len(m.inside))}"


def _describe_gpus(waiting: WaitGraph, ranks: Sequence[int]) -> str:
    """Return text about GPUs that have not begun the work which their processes have entered or queued."""
    entered = next((m for m in waiting.missing if set(ranks) & set(m.queued)), None)
    if entered:
        return _describe_missing(entered, tuple(r for r in ranks if r in entered.queued))
    first = next(m for m in waiting.missing if set(ranks) & set(m.ranks))
    absent = tuple(r for r in ranks if r in first.ranks)
    whose = f"{format_ranks(ranks)}'s GPU has" if len(ranks) == 1 else f"the GPUs of {format_ranks(ranks)} have"
    return f"{whose} not begun what was queued on it; {_describe_missing(first, absent)}"


def _count_waits(count: int) -> str:
    return f"{count} {'waits' if count == 1 else 'wait'}"


def _describe_crossed(waiting: WaitGraph, crossed: Sequence[int], mains: dict[int, Process]) -> str:
    """Return text about ranks that wait while other ranks wait for them. They may wait in a circle, in another
    operation than the rest of their group, or for something that no record shows."""
    if waiting.circle:
        theirs = [m for m in waiting.missing if set(crossed) & {*m.inside, *m.ranks}]
        theirs.sort(key=lambda m: -len(m.inside))
        return "; ".join(_describe_missing(m, m.ranks) for m in theirs[:4])
    if waiting.mixed:
        return _describe_mixed(waiting.mixed[0])
    awaited = [m for m in waiting.missing if set(m.ranks) & set(crossed)]
    first, groups = awaited[0], len({m.group for m in awaited})
    where = f"group {first.group}" if groups == 1 else f"{groups} groups"
    waits = _count_waits(len({rank for m in awaited for rank in m.inside}))
    verb = "has" if len(crossed) == 1 else "have"
    told = f"{format_ranks(crossed)} {verb} not come to {first.op or 'collective'} {first.seq} of {where}; {waits}"
    places = cluster_ranks([mains[rank] for rank in crossed if rank in mains])
    return f"{told}; themselves waiting: {_describe_waits(places)}" if places else told


def _describe_mixed(m: MixedOperations) -> str:
    """Return text about ranks in different operations. Ranks in the one commonest operation are only counted."""
    number = f"under number {m.seq} of group {m.group}"
    (most, many), *others = m.ops
    if set(many) <= set(m.ranks):
        return f"different collectives {number}: " + ", ".join(f"{op} on {format_ranks(r)}" for op, r in m.ops[:4])
    apart = ", ".join(f"{format_ranks(ranks)} in {op}" for op, ranks in others[:4])
    return f"{apart}, {len(many)} others in {most}, {number}"


def _describe_unlike(m: UnlikeMessage) -> str:
    sent, awaited = (f"{c.size_bytes} bytes with tag {c.tag}" for c in (m.sent, m.awaited))
    what = f"message {m.number} of group {m.sent.group}"
    return f"{what}: rank {m.sent.source} sends {sent}, and rank {m.sent.target} awaits {awaited}"


def _describe_waits(places: Sequence[StackCluster]) -> str:
    """Return text that names up to four code locations and the ranks that wait at each, in the order of these ranks."""
    shown = sorted(places, key=lambda c: c.ranks)[:4]
    more = f" and at {len(places) - len(shown)} more places" if len(places) > len(shown) else ""
    return ", ".join(f"{format_ranks(c.ranks)} in {c.frames[-1]}" for c in shown) + more


def _describe_place(ranks: Sequence[int], mains: dict[int, Process], children: list[Process]) -> str:
    """Return text that says where the first of these ranks is in its code, and where up to two of its children are."""
    main = mains.get(ranks[0])
    if main is None:
        return ""
    at = [f"it is in {fold_stack(frames[-1:])[0]}"] if (frames := main_frames(main)) else []
    own = [p for p in children if p.rank == ranks[0] and main_frames(p)]
    at += [f"its child {p.name or p.pid} in {fold_stack(main_frames(p)[-1:])[0]}" for p in own[:2]]
    return f"; {', '.join(at)}" if at else f"; {main.error}" if main.error else ""


def _widen_suspects(
    found: BlockingRanks, node_of: dict[int, str], seats: tuple[Seat, ...], mesh: Dims
) -> BlockingRanks:
    """Return the result with the nodes of its ranks added. If they are on several nodes, add the other nodes of the
    smallest parallel group that covers these nodes. Nodes are compared, not ranks: with one tensor-parallel group per
    node, blocking ranks of two nodes are seldom in one pipeline group. A group that spans all nodes is not used,
    because the job cannot evict every node. Nothing is added if GPUs show the cause."""
    nodes = tuple(sorted({node_of[rank] for rank in found.ranks if rank in node_of}))
    group, wide = "", nodes
    if len(nodes) > 1 and found.how != "gpu":  # the GPUs themselves are known
        everybody = set(node_of.values())
        covering = [
            (len(around), f"{dim} {number}", around)
            for dim, groups in parallel_groups(dense_mesh(seats, mesh) if mesh else ())
            for number, members in enumerate(groups)
            if (around := {node_of[rank] for rank in members if rank in node_of}).issuperset(nodes)
            and around != everybody
        ]
        for _, group_name, around in sorted(covering, key=lambda one: one[:2])[:1]:
            group, wide = group_name, tuple(sorted(around))
    return msgspec.structs.replace(found, nodes=nodes, group=group, wide=wide)
