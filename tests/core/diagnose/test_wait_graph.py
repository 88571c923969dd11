"""Who waits for whom, by sequence numbers."""

from holdfast.core.diagnose.wait_graph import WaitGraph, build_wait_graph
from tests.core.diagnose.places import flight


def test_one_is_missing() -> None:
    found = build_wait_graph(
        [flight(0, ("0", 6, 5)), flight(1, ("0", 5, 5)), flight(2, ("0", 6, 5)), flight(3, ("0", 6, 5))]
    )
    (missing,) = found.missing
    assert (missing.group, missing.seq, missing.op) == ("0", 6, "all_reduce")
    assert (missing.inside, missing.ranks) == ((0, 2, 3), (1,))
    assert found.outside == (1,) and found.circle == () and found.mixed == ()


def test_all_inside_or_all_outside_is_nobody() -> None:
    for entered, completed in ((6, 5), (6, 6)):
        found = build_wait_graph([flight(rank, ("0", entered, completed)) for rank in range(4)])
        assert (found.missing, found.outside, found.circle, found.mixed) == ((), (), (), ())
    assert build_wait_graph([]) == WaitGraph()


def test_through_another_group_the_culprit_is_found() -> None:
    # 0 and 1 wait for 2 in the world; 2 waits for 3 in a group of its own; 3 is outside.
    found = build_wait_graph([
        flight(0, ("0", 9, 8)),
        flight(1, ("0", 9, 8)),
        flight(2, ("0", 8, 8), ("pp", 4, 3)),
        flight(3, ("0", 8, 8), ("pp", 3, 3)),
    ])  # fmt: skip
    assert found.outside == (3,)


def test_an_old_word_shows_a_rank_behind_not_inside() -> None:
    # Rank 1 last told of a collective it was in long ago; everybody has come to that one since.
    found = build_wait_graph([flight(0, ("0", 50, 49)), flight(1, ("0", 20, 19)), flight(2, ("0", 50, 49))])
    assert found.outside == (1,)


def test_a_circle_is_a_set() -> None:
    circle = [flight(1, ("0", 5, 5), ("x", 3, 2), ("y", 1, 1)), flight(2, ("0", 5, 5), ("x", 2, 2), ("y", 2, 1))]
    found = build_wait_graph([flight(0, ("0", 6, 5)), *circle, flight(3, ("0", 6, 5))])
    assert found.outside == () and found.circle == (1, 2)
    two = build_wait_graph([flight(0, ("0", 6, 5), ("side", 0, 0)), flight(1, ("0", 5, 5), ("side", 1, 0))])
    assert two.circle == (0, 1)


def test_another_operation_under_the_same_number() -> None:
    others = [flight(rank, ("0", 6, 5)) for rank in (0, 1, 3)]
    [few] = build_wait_graph([*others, flight(2, ("0", 6, 5), op="broadcast")]).mixed
    assert (few.ranks, few.ops) == ((2,), (("all_reduce", (0, 1, 3)), ("broadcast", (2,))))
    pair = [flight(0, ("0", 6, 5)), flight(1, ("0", 6, 5), op="barrier")]
    [tied] = build_wait_graph(pair).mixed
    assert (tied.ranks, tied.group, tied.seq) == ((0, 1), "0", 6)


def test_who_never_came_to_the_world_is_missing_from_it() -> None:
    assert build_wait_graph([flight(0, ("0", 1, 0)), flight(1), flight(2, ("0", 1, 0))]).outside == (1,)
