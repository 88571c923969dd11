"""Naming, from traces made by hand."""

import msgspec

from holdfast.core.diagnose.blocking_ranks import BlockingRanks, find_blocking, vote_rounds
from holdfast.core.diagnose.rank_motion import find_motion
from holdfast.core.diagnose.wait_graph import build_wait_graph
from holdfast.core.rank_ranges import format_ranks
from holdfast.model.job_and_seats import Seat
from holdfast.model.rank_traces import Flight, Trace
from tests.core.diagnose.places import GATHER, RECEIVE, REDUCE, SEND, SLEEP, flight, process, trace

SEATS = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=2 * i, nproc=2) for i in range(4))
IN = ("0", 6, 5)
OUT = ("0", 5, 5)


def test_a_stopped_rank_is_named_for_certain() -> None:
    found = find_blocking(trace(process(0), process(1), process(2, SLEEP, state="T"), process(3)))
    assert (found.ranks, found.nodes, found.how, found.hard) == ((2,), ("n1",), "stopped", True)


def test_a_stopped_child_names_its_rank() -> None:
    child = process(1, (), child=True, state="T")
    found = find_blocking(trace(process(0), process(1, SLEEP), child, process(2), process(3)))
    assert (found.ranks, found.how, found.hard) == ((1,), "stopped", True)
    assert "rank 1 " in found.reason


def test_a_child_that_makes_the_steps_is_looked_at_in_place_of_its_rank() -> None:
    parents = [process(rank, (("join", "torch/multiprocessing/spawn.py", 1),)) for rank in range(4)]
    children = [process(rank, SLEEP if rank == 2 else REDUCE, child=True) for rank in range(4)]
    assert find_blocking(trace(*parents, *children)).ranks == ()
    train = [msgspec.structs.replace(child, steps=True) for child in children]
    found = find_blocking(trace(*parents, *train))
    assert (found.ranks, found.how) == ((2,), "apart")
    train[1] = msgspec.structs.replace(train[1], state="T")
    found = find_blocking(trace(*parents, *train))
    assert (found.ranks, found.how) == ((1,), "stopped") and "(pid 1501)" in found.reason


def test_a_stopped_child_of_the_only_rank_is_named() -> None:
    stopped = process(0, child=True, state="T")
    found = find_blocking(trace(process(0), stopped))
    assert (found.ranks, found.how) == ((0,), "stopped")
    assert find_blocking(trace(process(0, state="T"), stopped)).ranks == ()


def test_a_rank_that_goes_after_its_script_has_returned_is_not_gone() -> None:
    over = msgspec.structs.replace(process(3, (), state="Z"), ending="returned")
    assert find_blocking(trace(process(0), process(1), process(2), over)).how != "gone"


def test_a_rank_that_is_gone_is_named_for_certain() -> None:
    gone = process(3, (), state="X")
    found = find_blocking(trace(process(0), process(1), process(2), gone))
    assert (found.ranks, found.how, found.hard) == ((3,), "gone", True)


def test_all_stopped_is_nobody() -> None:
    found = find_blocking(trace(*(process(rank, state="T") for rank in range(4))))
    assert found.ranks == () and found.how == "" and found.reason == "every rank is stopped"


def test_missing_from_a_collective() -> None:
    flights = (flight(0, IN), flight(1, OUT), flight(2, IN), flight(3, IN))
    worker = process(1, SLEEP, child=True)
    found = find_blocking(trace(process(0), process(1, SLEEP), worker, process(2), process(3), flights=flights))
    assert (found.ranks, found.nodes, found.how, found.hard) == ((1,), ("n0",), "missing", True)
    assert "rank 1 " in found.reason and "all_reduce 6" in found.reason and found.reason.count("load") == 2
    assert [c.ranks for c in found.clusters] == [(0, 2, 3), (1,)]


def test_two_ranks_suffice_for_a_witness() -> None:
    found = find_blocking(trace(process(0), process(1, SLEEP), flights=(flight(0, IN), flight(1, OUT))))
    assert found.ranks == (1,) and found.hard


def test_most_behind_a_few_is_nobody() -> None:
    flights = (flight(0, IN), flight(1, OUT), flight(2, OUT), flight(3, OUT))
    found = find_blocking(trace(process(0), *(process(r, SLEEP) for r in (1, 2, 3)), flights=flights))
    assert (found.ranks, found.how) == ((), "")
    assert found.reason == "most have not come yet: ranks 1-3 have not come to all_reduce 6 of group 0; 1 waits"


def test_a_rank_that_waits_for_a_message_is_not_certain() -> None:
    flights = (flight(0, IN), flight(1, IN), flight(2, OUT), flight(3, OUT))
    found = find_blocking(trace(process(0), process(1), process(2, RECEIVE), process(3, SLEEP), flights=flights))
    assert (found.ranks, found.hard) == ((3,), True)
    found = find_blocking(
        trace(
            process(0), process(1), process(2), process(3, RECEIVE), flights=(*flights[:2], flight(2, IN), flights[3])
        )
    )
    assert (found.ranks, found.how, found.hard) == ((3,), "crossed", False)


def test_a_circle_of_two_among_three_is_one_though_most_wait_for_nobody() -> None:
    """The third computes meanwhile."""
    flights = (flight(0, ("x", 3, 2), ("y", 1, 1)), flight(1, ("x", 2, 2), ("y", 2, 1)), flight(2, ("z", 4, 4)))
    found = find_blocking(trace(process(0), process(1), process(2, SLEEP), flights=flights))
    assert (found.ranks, found.how, found.deadlock) == ((0, 1), "crossed", "circle")


def test_a_deadlock_is_a_set() -> None:
    flights = (flight(0, IN, ("side", 0, 0)), flight(1, OUT, ("side", 1, 0)), flight(2, IN), flight(3, IN))
    found = find_blocking(trace(*(process(rank) for rank in range(4)), flights=flights))
    assert (found.ranks, found.how, found.hard) == ((0, 1), "crossed", False)
    assert all(part in found.reason for part in ("rank 0 ", "rank 1 ", "all_reduce 6"))


def test_different_operations_are_told_with_their_names() -> None:
    """Of two ranks there are no others that wait for them."""
    ranks = [process(rank) for rank in range(4)]
    two = (flight(0, ("0", 12, 11), op="broadcast"), flight(1, ("0", 12, 11)))
    found = find_blocking(trace(*ranks[:2], flights=two))
    assert (found.ranks, found.deadlock, found.all) == ((0, 1), "operations", True)
    said = "different collectives under number 12 of group 0: broadcast on rank 0, all_reduce on rank 1"
    assert found.reason == said
    four = [flight(rank, ("0", 20, 19), op="all_gather" if rank == 2 else "all_reduce") for rank in range(4)]
    found = find_blocking(trace(*ranks, flights=tuple(four)))
    assert (found.ranks, found.deadlock, found.all) == ((2,), "operations", False)
    assert found.reason == "rank 2 in all_gather, 3 others in all_reduce, under number 20 of group 0"


def test_without_a_recorder_stacks_speak() -> None:
    found = find_blocking(trace(process(0), process(1, SLEEP), process(2), process(3)))
    assert (found.ranks, found.how, found.hard) == ((1,), "apart", False)
    assert "rank 1 in load (run/train.py)" in found.reason


def test_nobody_is_an_answer() -> None:
    same = find_blocking(trace(*(process(rank) for rank in range(4))))
    assert same.ranks == () and "all_reduce (torch/distributed/distributed_c10d.py)" in same.reason
    loading = find_blocking(trace(*(process(rank) for rank in range(4)), process(1, SLEEP, child=True)))
    assert loading.ranks == () and loading.reason.endswith(", a child 1501 of rank 1 in load (run/train.py)")
    scattered = [(("<module>", "a.py", 1), (f"f{rank}", "a.py", 1)) for rank in range(4)]
    assert find_blocking(trace(*(process(rank, at) for rank, at in enumerate(scattered)))).ranks == ()
    assert find_blocking([]).ranks == ()


def test_a_node_that_does_not_answer() -> None:
    traces = [*trace(process(0), process(1), flights=(flight(0, IN), flight(1, IN)))]
    silent = Trace(node="n1", at=1.0, error="no answer within 6 s")
    traces.append(silent)
    found = find_blocking(traces, SEATS[:2])
    assert (found.ranks, found.nodes, found.how, found.hard) == ((2, 3), ("n1",), "silent", False)
    assert f"n1: {silent.error}" in found.reason


def test_suspects_on_several_nodes_are_widened_to_their_group() -> None:
    mesh = (("pp", 2), ("dp", 2), ("tp", 2))
    out = (5, 6)
    flights = tuple(flight(r, OUT if r in out else IN) for r in range(8))
    found = find_blocking(
        trace(*(process(r, SLEEP if r in out else REDUCE) for r in range(8)), flights=flights), SEATS, mesh
    )
    assert (found.ranks, found.nodes) == (out, ("n2", "n3"))
    assert found.group.startswith("dp") and found.wide == ("n2", "n3")  # of other ranks, but of the same nodes
    out = (4, 6)
    flights = tuple(flight(r, OUT if r in out else IN) for r in range(8))
    found = find_blocking(
        trace(*(process(r, SLEEP if r in out else REDUCE) for r in range(8)), flights=flights), SEATS, mesh
    )
    assert found.group.startswith("dp") and found.wide == ("n2", "n3")
    found = find_blocking(trace(process(0), process(1, SLEEP), *(process(r) for r in range(2, 8))), SEATS, mesh)
    assert (found.group, found.wide) == ("", ("n0",))  # one node is a group small enough


def eight_each(count: int) -> tuple[Seat, ...]:
    return tuple(Seat(node=f"n{i}", group_rank=i, first_rank=8 * i, nproc=8) for i in range(count))


def test_groups_are_compared_by_nodes_where_a_tensor_parallel_group_shares_one() -> None:
    """Whichever of its eight GPUs hangs, a node belongs to one pipeline only."""
    seats, mesh = eight_each(8), (("dp", 2), ("pp", 4), ("tp", 8))
    out = (8 * 5 + 3, 8 * 6 + 1)  # of two stages, and of no common group of ranks
    places = tuple(process(r, SLEEP if r in out else REDUCE, node=f"n{r // 8}") for r in range(64))
    found = find_blocking(trace(*places), seats, mesh)
    assert (found.ranks, found.nodes) == (out, ("n5", "n6"))
    assert found.group.startswith("pp") and found.wide == ("n4", "n5", "n6", "n7")


def test_a_group_of_all_nodes_isolates_nobody() -> None:
    seats, out = eight_each(4), (3, 9)
    places = tuple(process(r, SLEEP if r in out else REDUCE, node=f"n{r // 8}") for r in range(32))
    found = find_blocking(trace(*places), seats, (("pp", 4), ("tp", 8)))
    assert (found.group, found.wide) == ("", ("n0", "n1"))


# ByteRobust's own example: TP 2, PP 4, DP 4 on sixteen machines. Machine 15 stands in a tensor-parallel
# all-gather, 14 sends to it, 13 and 12 wait for what it should send back, and all others are in the gradient sync.
MACHINES = tuple(Seat(node=f"m{i}", group_rank=i, first_rank=2 * i, nproc=2) for i in range(16))
PIPELINE = ("m12", "m13", "m14", "m15")
MESH = (("dp", 4), ("pp", 4), ("tp", 2))
PLACES = {15: GATHER, 14: SEND, 13: RECEIVE, 12: RECEIVE}


def published_flights() -> list[Flight]:
    flights = []
    for rank in range(32):
        stage, late = rank % 8, rank >= 24
        sync = (f"dp {stage}", 5, 5) if late else (f"dp {stage}", 6, 5)
        gather = (f"tp {rank // 2}", 9, 8 if rank // 2 == 15 else 9)
        flights.append(msgspec.structs.replace(flight(rank, sync, gather), node=f"m{rank // 2}"))
    return flights


def published_hang(*, recorder: bool) -> BlockingRanks:
    processes = [process(r, PLACES.get(r // 2, REDUCE), node=f"m{r // 2}") for r in range(32)]
    flights = tuple(published_flights()) if recorder else ()
    return find_blocking(trace(*processes, flights=flights), MACHINES, MESH)


def test_the_published_example_by_stacks_alone() -> None:
    """All wait, so nobody is outside: the largest group is healthy, and the pipeline of the others is isolated."""
    found = published_hang(recorder=False)
    assert (found.ranks, found.how, found.hard) == (tuple(range(24, 32)), "apart", False)
    assert (found.group[:2], found.wide) == ("pp", PIPELINE)
    assert "24 of 32 " in found.reason and " all_reduce " in found.reason
    for said in ("ranks 24-27 in recv", "ranks 28-29 in isend", "ranks 30-31 in all_gather_into_tensor"):
        assert said in found.reason


def test_the_published_example_with_the_flight_recorder() -> None:
    found = published_hang(recorder=True)
    assert (found.ranks, found.how, found.hard) == (tuple(range(24, 32)), "crossed", False)
    assert (found.group[:2], found.wide) == ("pp", PIPELINE)
    assert found.reason.startswith("ranks 24-31 ") and " all_reduce 6 " in found.reason and " 24 wait" in found.reason
    assert "ranks 30-31 in all_gather_into_tensor" in found.reason
    assert build_wait_graph(published_flights()).mixed == (), "they are in no collective of that group"


def test_two_halves_that_wait_apart_are_nobody() -> None:
    halves = [process(rank, REDUCE if rank < 2 else GATHER) for rank in range(4)]
    assert find_blocking(trace(*halves)).ranks == ()


def test_votes() -> None:
    def named(*ranks: int) -> BlockingRanks:
        return BlockingRanks(ranks=ranks, nodes=tuple(f"n{r}" for r in ranks), how="apart", reason="late")

    found = vote_rounds([named(2), named(2), named(1), named(2), named(2)])
    assert (found.ranks, found.nodes) == ((2,), ("n2",))
    assert "rank 2 " in found.reason and " 4 of 5 " in found.reason and found.reason.endswith(": late")
    assert vote_rounds([named(2), named(1), named(2), named(1), named(2)]).ranks == ()  # no margin
    assert vote_rounds([named(2), named(), named(), named(), named(2)]).ranks == ()
    assert vote_rounds([named(1, 2), named(1, 2), named(1, 2), named(1), named(1, 2)]).ranks == (1, 2)
    assert vote_rounds([]).ranks == () and vote_rounds([named()] * 5).ranks == ()


def test_motion() -> None:
    before = [process(0), process(1), process(1, SLEEP, child=True), process(2)]
    worked = msgspec.structs.replace(before[2], cpu_s=0.5, io_bytes=100)
    seen = find_motion(trace(*before), trace(before[0], before[1], worked, process(2, SLEEP), process(3)))
    assert (seen[0].cpu_s, seen[0].io_bytes, seen[0].frames) == (0.0, 0, False)
    assert (seen[1].cpu_s, seen[1].io_bytes, seen[1].frames) == (0.5, 100, False)
    assert seen[2].frames and seen[3].frames


def test_coming_to_collectives_is_motion() -> None:
    before = trace(process(0), process(1), flights=(flight(0, OUT), flight(1, OUT)))
    after = trace(process(0), process(1), flights=(flight(0, IN), flight(1, OUT)))
    seen = find_motion(before, after)
    assert (seen[0].collectives, seen[1].collectives) == (1, 0)
    assert find_motion((), after)[0].collectives == 0


def test_ranks_in_words() -> None:
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([0, 1, 2, 7, 5]) == "ranks 0-2, 5, 7"
    assert format_ranks(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"


def test_ranks_that_have_returned_are_told_and_not_counted() -> None:
    seats = (Seat(node="n0", group_rank=0, first_rank=0, nproc=2),)
    place = "all_reduce (torch/distributed/distributed_c10d.py)"
    assert find_blocking(trace(process(0)), seats).reason == f"rank 0 is in {place}; rank 1 has ended"
    over = msgspec.structs.replace(process(1, ()), ending="returned")
    assert find_blocking(trace(process(0), over), seats).reason == f"rank 0 is in {place}; rank 1 has ended"
    assert find_blocking(trace(process(0), process(1)), seats).reason == f"all 2 ranks are in {place}"
    assert find_blocking(trace(process(0), process(1, ())), seats).reason.endswith("; no stack of rank 1 was read")
    assert find_blocking(trace(process(0)), (Seat(node="n0", group_rank=0, first_rank=0, nproc=1),)).reason == (
        f"rank 0 is in {place}"
    )


def test_places_are_counted_among_ranks_that_have_one() -> None:
    apart = trace(process(0), process(1), process(2, SEND), process(3, SEND))
    assert find_blocking(apart, SEATS[:2]).reason == "4 ranks are at 2 places, and no place has most of them"
    later = find_blocking(apart, SEATS[:3]).reason
    assert later == "4 ranks are at 2 places, and no place has most of them", "n2 has not answered"
