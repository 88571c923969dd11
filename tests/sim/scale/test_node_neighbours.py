"""Who is beside whom: switches, racks and pipelines."""

from holdfast.model.job_and_seats import Seat
from holdfast.sim.scale.node_neighbours import find_place, seats_around

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
