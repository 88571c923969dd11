"""Who is beside whom: switches, racks and pipelines."""

from holdfast.core.diagnose.blocking_ranks import find_blocking
from holdfast.model.job_and_seats import Seat
from holdfast.sim.scale.node_neighbours import find_place, seats_around
from tests.core.diagnose.places import REDUCE, SLEEP, process, trace

SEATS = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=4 * i, nproc=4) for i in range(20))


def test_blocks_of_seats() -> None:
    assert [seat.node for seat in seats_around(SEATS, "n5", 4)] == ["n4", "n5", "n6", "n7"]
    assert [seat.node for seat in seats_around(SEATS, "n19", 8)] == ["n16", "n17", "n18", "n19"], "fewer at the end"
    assert seats_around(SEATS, "gone", 4) == ()


def test_a_pipeline_and_the_ranks_that_are_named() -> None:
    found = find_place(SEATS, "n9", "n0")
    assert found.group == tuple(f"n{i}" for i in range(8, 16)) and found.ranks == (36, 40)
    assert find_place(SEATS, "n15", "n0").ranks == (32, 60), "its neighbour is of the same pipeline"
    assert find_place(SEATS[:1], "n0", "n0").ranks == (0,)
    nobody = find_place((), "n0", "n1")
    assert (nobody.group, nobody.ranks) == ((), ())


def test_the_simulated_pipeline_is_the_group_that_naming_isolates() -> None:
    """Two neighbours hang, each with another of its eight GPUs."""
    seats = tuple(Seat(node=f"n{i:02}", group_rank=i, first_rank=8 * i, nproc=8) for i in range(24))
    assumed = find_place(seats, "n10", "n00")
    stuck = {first + number for number, first in enumerate(assumed.ranks, 3)}
    places = [
        process(rank, SLEEP if rank in stuck else REDUCE, node=seat.node)
        for seat in seats
        for rank in range(seat.first_rank, seat.first_rank + 8)
    ]
    found = find_blocking(trace(*places), seats, (("dp", 3), ("pp", 8), ("tp", 8)))
    assert set(found.ranks) == stuck and found.wide == assumed.group
