"""Works out which ranks wait for which other ranks, from the sequence numbers of collectives.

A rank that entered a collective waits for every member of the group that has not entered it. A rank is missing if other
ranks wait for it and it waits for nobody: it is outside of every collective. If no rank is missing, the ranks wait in a
circle. Records are up to a second old, which does not matter in a stalled job. A rank that holds the interpreter's lock
cannot report. It then appears to be further behind than it is, and is rightly named.

Under NCCL a process enters a collective long before its GPU begins it. So GPUs are compared, if all members of a group
report what their GPUs have begun. A GPU in a collective waits for every GPU that has not begun this collective. If the
process of such a late GPU has entered it already (`queued`), other ranks wait for the GPU and not for its process.

A process far ahead of its GPU can queue more messages than torch's recorder holds. The recorder has then dropped the
message in which the GPU is. Such a rank is doubted: it seems to wait for nobody, or for ranks that its process is ahead
of. Others may be named because of it, but neither the rank itself nor a circle through it.
"""

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.model.rank_traces import Channel, Collective, Flight

WORLD = "0"  # torch's name of the group of all ranks
_CIRCLE = 256  # ranks; more in a circle name nobody


class MissingAtCollective(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that some ranks of a group have entered and others have not."""

    group: str
    seq: int
    op: str
    inside: tuple[int, ...]
    ranks: tuple[int, ...]  # who has not come
    message: bool = False  # not a collective: `inside` sends to `ranks`, or receives from them
    queued: tuple[int, ...] = ()  # of these: whose process has entered it, and whose GPU has not begun it


class PassedCollective(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that a few ranks of a group have ended, although most ranks have begun it and do not end it."""

    group: str
    seq: int
    op: str  # of most
    ended_op: str  # of the few; "": not known, or it differs among them
    inside: tuple[int, ...]
    ranks: tuple[int, ...]  # who have gone on


class MixedOperations(msgspec.Struct, frozen=True, kw_only=True):
    """Different operations that ranks of a group have entered under one number."""

    group: str
    seq: int
    ops: tuple[tuple[str, tuple[int, ...]], ...]  # and who is in each, the commonest first

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks outside the commonest operation; all ranks if two operations are equally common."""
        tied = len(self.ops[0][1]) == len(self.ops[1][1])
        return tuple(sorted(rank for _, ranks in self.ops[0 if tied else 1 :] for rank in ranks))


class UnlikeMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message whose sender and receiver disagree about its size or tag."""

    number: int
    sent: Channel
    awaited: Channel


class WaitGraph(msgspec.Struct, frozen=True, kw_only=True):
    missing: tuple[MissingAtCollective, ...] = ()
    outside: tuple[int, ...] = ()  # waited for, and waiting for nobody
    circle: tuple[int, ...] = ()  # without such: who wait for one another
    mixed: tuple[MixedOperations, ...] = ()
    passed: tuple[PassedCollective, ...] = ()
    unended: tuple[MissingAtCollective, ...] = ()  # begun by all GPUs of a group, and ended by none; nobody is missing
    unlike: tuple[UnlikeMessage, ...] = ()  # messages that both ends wait in
    doubted: tuple[int, ...] = ()  # whose GPU may be in a message that torch's recorder has dropped
    told: int = 0  # ranks whose flight recorder was read


def build_wait_graph(flights: Sequence[Flight], blocked: Iterable[int] = ()) -> WaitGraph:
    """Build the wait graph from the newest record of every rank; `blocked` are ranks that wait in torch.distributed."""
    by_group: dict[str, dict[int, Collective]] = {}
    for flight in flights:
        for one in flight.groups:
            by_group.setdefault(one.group, {})[flight.rank] = one
    for flight in flights:
        by_group.setdefault(WORLD, {}).setdefault(flight.rank, Collective(group=WORLD, entered=0, completed=0))
    processes = list(by_group.values())
    groups = [_see_gpus(group) for group in processes]
    missing = tuple(m for group, own in zip(groups, processes, strict=True) for m in _find_missing(group, own))
    ends = _pair_ends(flights)
    waits = set(blocked)
    unmatched = [m for pair in ends for m in _find_unmatched(*pair, waits)]
    missing += tuple(sorted(unmatched, key=lambda m: m.op != "send"))  # a sender may not wait yet: others tell it surer
    targets = {rank for m in missing for rank in m.ranks}
    waits_for: dict[int, set[int]] = {}
    for m in missing:
        for rank in targets.intersection(m.inside):
            waits_for.setdefault(rank, set()).update(m.ranks)
    doubted = _find_doubted(flights)
    outside = tuple(sorted(targets - waits_for.keys() - doubted))
    circle = () if outside else _find_circle(waits_for)
    return WaitGraph(
        missing=missing,
        outside=outside,
        circle=() if doubted.intersection(circle) else circle,
        doubted=tuple(sorted(doubted)),
        mixed=() if missing else tuple(m for group in groups for m in _find_mixed(group)),
        unlike=tuple(m for one, other in ends for m in _find_unlike(one, other, waits)),
        passed=tuple(p for group in groups for p in _find_passed(group)),
        unended=tuple(m for group in groups for m in _find_unended(group)),
        told=len(flights),
    )


def _find_doubted(flights: Sequence[Flight]) -> set[int]:
    """Return the ranks whose recorder has dropped messages: what their GPU has begun is not known in a channel that was
    used, although some rank knows it of a channel of that group."""
    by_rank = {flight.rank: flight.channels or () for flight in flights}
    known = {channel.group for channels in by_rank.values() for channel in channels if channel.begun is not None}
    return {
        rank
        for rank, channels in by_rank.items()
        if any(channel.begun is None and channel.posted and channel.group in known for channel in channels)
    }


def _see_gpus(group: dict[int, Collective]) -> dict[int, Collective]:
    """Return the collectives as the GPUs see them: what the process has entered is replaced by what its GPU has begun.
    Return them unchanged if a member of the group does not report its GPU."""
    told = {rank: one.started if one.entered else 0 for rank, one in group.items()}
    if None in told.values() or not any(told.values()):
        return group
    return {rank: msgspec.structs.replace(one, entered=told[rank], op=one.started_op) for rank, one in group.items()}


def _find_missing(group: dict[int, Collective], own: dict[int, Collective]) -> Iterable[MissingAtCollective]:
    inside: dict[int, list[int]] = {}
    for rank, one in group.items():
        if one.entered > one.completed:
            inside.setdefault(one.entered, []).append(rank)
    for seq, ranks in sorted(inside.items(), reverse=True):
        absent = tuple(sorted(rank for rank, one in group.items() if one.entered < seq))
        if absent:
            some = group[ranks[0]]
            yield MissingAtCollective(
                group=some.group,
                seq=seq,
                op=some.op,
                inside=tuple(sorted(ranks)),
                ranks=absent,
                queued=tuple(rank for rank in absent if own[rank].entered >= seq),
            )


def _find_passed(group: dict[int, Collective]) -> Iterable[PassedCollective]:
    """Yield the collective that all ranks have entered, that most ranks are still in, and that the other ranks have
    ended. As no rank is missing, these other ranks ran another operation, or their data has not arrived."""
    seq = min(one.entered for one in group.values())
    inside = tuple(sorted(rank for rank, one in group.items() if one.completed < one.entered == seq))
    ahead = {rank: one for rank, one in group.items() if one.completed >= seq}
    if ahead and len(inside) > len(ahead) and len(inside) + len(ahead) == len(group):
        ended = {one.ended_op for one in ahead.values() if one.completed == seq}
        some = group[inside[0]]
        yield PassedCollective(
            group=some.group,
            seq=seq,
            op=some.op,
            ended_op=ended.pop() if len(ended) == 1 else "",
            inside=inside,
            ranks=tuple(sorted(ahead)),
        )


def _find_unended(group: dict[int, Collective]) -> Iterable[MissingAtCollective]:
    """Yield the collective in which the GPUs of all members of a group are. Yield nothing if a GPU is elsewhere, or if
    a member does not report its GPU."""
    (some, *others) = group.values()
    alike = all(one.started == some.started for one in others)
    if alike and some.started and all(one.completed < some.started for one in group.values()):
        yield MissingAtCollective(
            group=some.group, seq=some.started, op=some.started_op, inside=tuple(sorted(group)), ranks=()
        )


_Ends = tuple[tuple[int, Channel], tuple[int, Channel]]  # the sender's and the receiver's rank, and what each counts


def _pair_ends(flights: Sequence[Flight]) -> list[_Ends]:
    """Return both ends of each channel between two ranks, if both ranks count their messages. An end that has recorded
    nothing counts 0 messages."""
    counted = {flight.rank: flight.channels for flight in flights if flight.channels is not None}
    known = {(c.group, c.source, c.target, rank): c for rank, channels in counted.items() for c in channels}
    found: list[_Ends] = []
    for group, source, target in sorted({key[:3] for key in known}):
        if source in counted and target in counted and source != target:
            none = Channel(group=group, source=source, target=target, posted=0, begun=0, ended=0)
            ends = [(rank, known.get((group, source, target, rank), none)) for rank in (source, target)]
            found.append((ends[0], ends[1]))
    return found


def _find_unmatched(
    sender: tuple[int, Channel], receiver: tuple[int, Channel], waits: set[int]
) -> Iterable[MissingAtCollective]:
    """Yield each message in which one end of a channel waits and which the other end has not reached. An end reaches a
    message when its GPU begins it or, if GPUs are not reported, when its process posts it. A GPU in a message waits for
    the other end in any case, if nobody knows how far that GPU has come."""
    for (rank, mine), (other, theirs), op in ((sender, receiver, "recv"), (receiver, sender, "send")):
        number, reached = mine.posted, theirs.posted
        if mine.begun is not None and mine.ended is not None:
            if mine.begun <= mine.ended:
                continue
            number, reached = mine.begun, -1 if theirs.begun is None else theirs.begun
        elif rank not in waits:
            continue
        if reached < number:
            yield MissingAtCollective(
                group=f"{mine.group} ({mine.source} -> {mine.target})",
                seq=number,
                op=op,
                inside=(rank,),
                ranks=(other,),
                message=True,
                queued=(other,) if theirs.posted >= number and (theirs.begun is not None or reached < 0) else (),
            )


def _find_unlike(
    sender: tuple[int, Channel], receiver: tuple[int, Channel], waits: set[int]
) -> Iterable[UnlikeMessage]:
    """Yield the message in which both ends of a channel are, if its size or, over gloo, its tag differs between
    them."""
    (source, sent), (target, awaited) = sender, receiver
    if sent.posted != awaited.posted:
        return
    if sent.begun is not None:  # NCCL knows no tags
        unlike = sent.size_bytes != awaited.size_bytes
        unlike = unlike and all(c.begun == sent.posted != c.ended for c in (sent, awaited))
    else:
        unlike = sent.tag != awaited.tag and {source, target} <= waits
    if unlike:
        yield UnlikeMessage(number=sent.posted, sent=sent, awaited=awaited)


def _find_mixed(group: dict[int, Collective]) -> Iterable[MixedOperations]:
    """Yield the different operations that ranks are in under the same sequence number."""
    inside = {rank: one for rank, one in group.items() if one.entered > one.completed and one.op}
    for seq in sorted({one.entered for one in inside.values()}):
        here: dict[str, list[int]] = {}
        for rank, one in sorted(inside.items()):
            if one.entered == seq:
                here.setdefault(one.op, []).append(rank)
        if len(here) > 1:
            ops = sorted(here.items(), key=lambda item: (-len(item[1]), item[1]))
            some = next(iter(inside.values()))
            yield MixedOperations(group=some.group, seq=seq, ops=tuple((op, tuple(ranks)) for op, ranks in ops))


def _find_circle(waits_for: dict[int, set[int]]) -> tuple[int, ...]:
    """Return the smallest set of ranks that wait only for each other; empty if no rank waits, or too many do."""
    if not waits_for or len(waits_for) > _CIRCLE:
        return ()
    reached = [sorted(_reachable_ranks(rank, waits_for)) for rank in waits_for]
    smallest = min(reached, key=lambda ranks: (len(ranks), ranks))
    return tuple(smallest)


def _reachable_ranks(start: int, waits_for: dict[int, set[int]]) -> set[int]:
    reached: set[int] = set()
    ahead = [start]
    while ahead:
        fresh = waits_for.get(ahead.pop(), set()) - reached
        reached |= fresh
        ahead.extend(fresh)
    return reached
