"""Naming by what has begun on GPUs, where the recorders of all ranks tell that."""

import msgspec
import pytest

from holdfast.core.diagnose.blocking_ranks import BlockingRanks, find_blocking
from holdfast.core.diagnose.rank_motion import find_motion
from holdfast.core.diagnose.suspect_hang_timeout import is_certain_deadlock
from holdfast.core.diagnose.wait_graph import build_wait_graph
from holdfast.model.job_and_seats import Seat
from holdfast.model.rank_traces import Channel, Collective, Flight
from tests.core.diagnose.places import REDUCE, SCRIPT, SLEEP, Places, process, trace

ITEM = (*SCRIPT, ("log", "/opt/run/train.py", 12))  # it waits for its own GPU
Counts = tuple[str, int, int, int]  # group, entered by the host, begun on the GPU, completed


def gpu_flight(rank: int, *groups: Counts, since: float = 100.0, usual_s: float = 1.0, at: float = 110.0) -> Flight:
    told = tuple(
        Collective(
            group=group,
            entered=entered,
            completed=completed,
            op="all_reduce",
            started=started,
            started_op="all_reduce",
            unbegun_since=since if started < entered else 0.0,
            unbegun_s=usual_s,
        )
        for group, entered, started, completed in groups
    )
    return Flight(node=f"n{rank // 2}", rank=rank, at=at, groups=told)


BEGUN, QUEUED = ("0", 41, 41, 40), ("0", 41, 40, 40)


def name_blocking(*flights: Flight, at: dict[int, Places] | None = None, seats: tuple[Seat, ...] = ()) -> BlockingRanks:
    places = at or {}
    return find_blocking(
        trace(*(process(f.rank, places.get(f.rank, ITEM)) for f in flights), flights=flights),
        seats,
        (("dp", 2), ("tp", 8)) if seats else (),
    )


def four(struck: Flight, usual: Counts = BEGUN) -> list[Flight]:
    return [struck if rank == struck.rank else gpu_flight(rank, usual) for rank in range(4)]


def test_a_gpu_that_has_not_begun_what_its_host_has_entered() -> None:
    found = name_blocking(*four(gpu_flight(2, QUEUED)))
    assert (found.ranks, found.nodes, found.how, found.hard) == ((2,), ("n1",), "gpu", True)
    assert found.reason == (
        "rank 2's GPU has not begun all_reduce 41 of group 0, which 3 others have begun; its process has entered it"
    )


@pytest.mark.parametrize("place", [REDUCE, SLEEP, ITEM])
def test_where_its_host_is_does_not_matter(place: Places) -> None:
    found = name_blocking(*four(gpu_flight(2, QUEUED)), at={2: place})
    assert (found.ranks, found.how) == ((2,), "gpu")


def test_a_host_that_has_not_come_is_no_gpu() -> None:
    flights = four(gpu_flight(2, ("0", 40, 40, 40)))
    found = name_blocking(*flights, at={2: SLEEP})
    assert (found.ranks, found.how) == ((2,), "missing")
    (missing,) = build_wait_graph(flights).missing
    assert (missing.op, missing.seq, missing.ranks, missing.queued) == ("all_reduce", 41, (2,), ())
    assert found.reason.startswith("rank 2 ") and " all_reduce 41 " in found.reason


def test_a_host_that_waits_for_its_gpu_is_not_named_for_those_that_run_ahead() -> None:
    """Rank 0 alone reads the loss; the others have queued twenty more. It is rank 2 whose GPU stands."""
    flights = [gpu_flight(0, BEGUN), gpu_flight(1, ("0", 61, 41, 40)), gpu_flight(2, ("0", 61, 40, 40))]
    found = name_blocking(*flights, gpu_flight(3, ("0", 61, 41, 40)), at={0: ITEM, 1: REDUCE, 2: REDUCE, 3: REDUCE})
    assert (found.ranks, found.how) == ((2,), "gpu")


def test_unknown_stays_unknown() -> None:
    """One rank does not tell what its GPU has begun: then hosts are compared, and all have come."""
    silent = Flight(node="n1", rank=2, groups=(Collective(group="0", entered=41, completed=40, op="all_reduce"),))
    found = name_blocking(*four(silent))
    assert (found.ranks, found.how) == ((), "") and "GPU" not in found.reason


def test_who_has_entered_nothing_has_begun_nothing() -> None:
    first = [gpu_flight(rank, ("0", 5, 1, 0)) for rank in (0, 1, 3)]
    found = name_blocking(*first, Flight(node="n1", rank=2), at={2: SLEEP})
    assert (found.ranks, found.how) == ((2,), "missing") and "all_reduce 1 " in found.reason


def test_all_gpus_in_one_collective_name_nobody_wherever_hosts_are() -> None:
    found = name_blocking(
        *(gpu_flight(rank, BEGUN) for rank in range(4)), at={0: SLEEP} | dict.fromkeys((1, 2, 3), REDUCE)
    )
    assert found.ranks == ()
    assert found.reason == "all 4 GPUs have begun all_reduce 41 of group 0 and none has ended it"


def test_it_has_to_last_longer_than_ever_before_to_be_certain() -> None:
    assert not name_blocking(*four(gpu_flight(2, QUEUED, since=97.0, usual_s=14.0))).hard
    assert name_blocking(*four(gpu_flight(2, QUEUED, since=97.0, usual_s=12.0))).hard
    assert not name_blocking(*four(gpu_flight(2, QUEUED, since=106.0))).hard, "a full queue takes seconds"


def test_a_gpu_that_is_in_another_collective_is_named_but_not_certain() -> None:
    """Its two members are both in it: the link between them, or NCCL, and not the GPU alone."""
    pair = [gpu_flight(rank, QUEUED, ("tp", 8, 8, 7)) for rank in (2, 3)]
    found = name_blocking(gpu_flight(0, BEGUN), gpu_flight(1, BEGUN), *pair)
    assert (found.ranks, found.how, found.hard) == ((2, 3), "gpu", False)
    assert found.reason.startswith("the GPUs of ranks 2-3 have not begun all_reduce 41 of group 0, which 2 others have")
    assert found.reason.endswith("their processes have entered it; a GPU of theirs has begun all_reduce 8 of group tp")


def test_the_gpu_at_the_end_of_a_chain_is_named() -> None:
    flights = [gpu_flight(0, BEGUN), gpu_flight(1, BEGUN)]
    flights += [gpu_flight(2, QUEUED, ("tp", 9, 8, 8)), gpu_flight(3, QUEUED, ("tp", 9, 9, 8))]
    found = name_blocking(*flights)
    assert (found.ranks, found.how, found.hard) == ((2,), "gpu", True)


def test_communicators_in_another_order_name_the_odd_one_and_are_not_certain() -> None:
    usual = [gpu_flight(rank, ("1", 21, 21, 20), ("2", 21, 20, 20)) for rank in (0, 1, 3)]
    flights = [*usual, gpu_flight(2, ("1", 21, 20, 20), ("2", 21, 21, 20))]
    found = name_blocking(*flights)
    assert (found.ranks, found.how, found.deadlock, found.hard) == ((2,), "crossed", "orders", False)
    assert not is_certain_deadlock(found, trace(process(2, REDUCE)), still=True)
    assert [(m.group, m.seq, m.ranks, m.queued, m.inside) for m in build_wait_graph(flights).missing] == [
        ("1", 21, (2,), (2,), (0, 1, 3)),
        ("2", 21, (0, 1, 3), (0, 1, 3), (2,)),
    ]
    assert found.reason == (
        "rank 2's GPU has not begun all_reduce 21 of group 1, which 3 others have begun; its process has entered it;"
        " the GPUs of ranks 0-1, 3 have not begun all_reduce 21 of group 2, which another one has begun;"
        " their processes have entered it"
    )


def test_a_whole_node_is_named_and_no_group_around_it() -> None:
    seats = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=2 * i, nproc=2) for i in range(8))
    flights = [gpu_flight(rank, QUEUED if rank in (2, 3, 5) else BEGUN) for rank in range(16)]
    found = name_blocking(*flights, seats=seats)
    assert (found.ranks, found.nodes, found.wide, found.hard) == ((2, 3, 5), ("n1", "n2"), ("n1", "n2"), True)
    most = [gpu_flight(rank, QUEUED if rank < 9 else BEGUN) for rank in range(16)]
    assert name_blocking(*most, seats=seats).ranks == ()


def test_another_operation_under_the_same_number() -> None:
    odd = gpu_flight(2, BEGUN)
    odd = msgspec.structs.replace(odd, groups=(msgspec.structs.replace(odd.groups[0], started_op="broadcast"),))
    found = name_blocking(*four(odd))
    assert (found.ranks, found.how) == ((2,), "crossed")


def test_what_gpus_begin_is_motion() -> None:
    before = trace(process(0), flights=(gpu_flight(0, ("0", 61, 40, 39)),))
    after = trace(process(0), flights=(gpu_flight(0, ("0", 61, 42, 41)),))
    assert find_motion(before, after)[0].collectives == 2


def test_queued_is_told_apart_from_missing() -> None:
    flights = [gpu_flight(0, BEGUN), gpu_flight(1, BEGUN), gpu_flight(2, QUEUED), gpu_flight(3, ("0", 40, 40, 40))]
    (missing,) = build_wait_graph(flights).missing
    assert (missing.inside, missing.ranks, missing.queued) == ((0, 1), (2, 3), (2,))


def test_one_that_has_ended_what_the_others_are_in() -> None:
    """Over NCCL the root of a broadcast ends it while the others are in a sum under the same number, and for ever."""
    ahead = gpu_flight(3, ("0", 42, 42, 41))
    found = name_blocking(*four(ahead))
    assert (found.ranks, found.how, found.deadlock, found.hard) == ((3,), "crossed", "passed", False)
    assert (
        found.reason == "rank 3 has ended collective 41 of group 0 and gone on; 3 are in all_reduce under that number"
    )
    (group,) = ahead.groups
    known = msgspec.structs.replace(ahead, groups=(msgspec.structs.replace(group, ended_op="broadcast"),))
    found = name_blocking(*four(known))
    assert (found.ranks, found.deadlock) == ((3,), "operations")
    (passed,) = build_wait_graph(four(known)).passed
    assert (passed.ended_op, passed.op, passed.seq, passed.ranks) == ("broadcast", "all_reduce", 41, (3,))
    assert found.reason.startswith("rank 3 ") and " broadcast 41 " in found.reason
    same = msgspec.structs.replace(ahead, groups=(msgspec.structs.replace(group, ended_op="all_reduce"),))
    assert name_blocking(*four(same)).deadlock == "passed", "what it sent may not have arrived"


def test_most_that_have_ended_what_a_few_are_in_are_not_named() -> None:
    flights = [gpu_flight(rank, ("0", 42, 42, 41) if rank else BEGUN) for rank in range(4)]
    assert name_blocking(*flights).ranks != (1, 2, 3)
    halves = [gpu_flight(rank, ("0", 42, 42, 41) if rank < 2 else BEGUN) for rank in range(4)]
    assert build_wait_graph(halves).passed == ()


def staged(rank: int, *channels: tuple[int, int, int, int, int], since: float = 0.0) -> Flight:
    """A stage of a pipeline: source and target, messages posted, begun and ended on its GPU."""
    told = tuple(
        Channel(group="0", source=source, target=target, posted=posted, begun=begun, ended=ended)
        for source, target, posted, begun, ended in channels
    )
    return Flight(node=f"n{rank // 2}", rank=rank, at=110.0, channels=told, unbegun_since=since, unbegun_s=1.0)


def pipeline(last: Flight) -> list[Flight]:
    """Small messages end on the sender's GPU whether or not the receiver's has begun them."""
    first = staged(0, (0, 1, 84, 84, 84), (1, 0, 81, 81, 80))
    return [first, staged(1, (0, 1, 84, 84, 84), (1, 0, 80, 80, 80), (1, 2, 84, 84, 84), (2, 1, 81, 81, 80)), last]


def test_a_last_stage_whose_gpu_does_not_begin_what_it_should_receive() -> None:
    """Its process waits for its loss, and has not come to what the others wait for."""
    found = name_blocking(*pipeline(staged(2, (1, 2, 84, 80, 80), (2, 1, 80, 80, 80), since=100.0)))
    assert (found.ranks, found.how, found.hard) == ((2,), "gpu", True)
    assert found.reason == (
        "rank 2's GPU has not begun what was queued on it; rank 2 has not come to send 81 of group 0 (2 -> 1); 1 waits"
    )


@pytest.mark.parametrize("begun", [80, 81])
def test_a_last_stage_that_is_late_by_itself(begun: int) -> None:
    """It has queued nothing that its GPU could begin, or its GPU is in a message."""
    late = staged(2, (1, 2, begun, begun, 80), (2, 1, 80, 80, 80), since=100.0 if begun > 80 else 0.0)
    found = name_blocking(*pipeline(late))
    assert (found.ranks, found.how) == ((2,), "missing")
