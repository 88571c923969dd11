"""Who sits where in the next generation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.membership.seating import growth_unit, next_seats
from holdfast.model.decider_events import Ready
from holdfast.model.job_and_seats import Dims, Job, Seat, world_size


def job(low: int, high: int | None = None) -> Job:
    return Job(run_id="r", min_nodes=low, max_nodes=high or low)


def pool(*names: str, nproc: int = 2) -> dict[str, Ready]:
    return {n: Ready(node=n, host=n, nproc=nproc, order=i) for i, n in enumerate(names)}


def places(seats: tuple[Seat, ...] | None) -> list[tuple[str, int, int]]:
    assert seats is not None
    return [(s.node, s.group_rank, s.first_rank) for s in seats]


def first(low: int, *names: str) -> tuple[Seat, ...]:
    seats = next_seats(job(low), (), (), pool(*names), may_shrink=False)
    assert seats is not None
    return seats


def test_the_first_generation_is_seated_by_order_then_name() -> None:
    ready = pool("b", "a")
    ready["c"] = Ready(node="c", host="c", nproc=2, order=0)
    assert places(next_seats(job(3), (), (), ready, may_shrink=False)) == [("b", 0, 0), ("c", 1, 2), ("a", 2, 4)]


def test_missing_nodes_are_waited_for() -> None:
    assert next_seats(job(3), (), (), pool("a", "b"), may_shrink=False) is None
    assert next_seats(job(3), (), (), pool("a", "b"), may_shrink=True) is None


def test_a_standby_takes_exactly_the_seat_of_the_evicted() -> None:
    old = first(3, "a", "b", "c")
    assert places(next_seats(job(3), old, {"b"}, pool("x", "y"), may_shrink=False)) == [
        ("a", 0, 0),
        ("x", 1, 2),
        ("c", 2, 4),
    ]


def test_an_evicted_node_that_is_back_in_the_pool_may_take_its_seat() -> None:
    old = first(2, "a", "b")
    assert places(next_seats(job(2), old, {"b"}, pool("b"), may_shrink=False)) == [("a", 0, 0), ("b", 1, 2)]


def test_a_standby_of_the_right_size_is_preferred() -> None:
    old = first(2, "a", "b")
    ready = pool("big", nproc=4) | {"fit": Ready(node="fit", host="fit", nproc=2, order=9)}
    assert places(next_seats(job(2), old, {"a"}, ready, may_shrink=False)) == [("fit", 0, 0), ("b", 1, 2)]


def test_a_standby_of_another_size_is_better_than_none() -> None:
    old = first(2, "a", "b")
    seats = next_seats(job(2), old, {"a"}, pool("big", nproc=4), may_shrink=False)
    assert seats is not None
    assert (places(seats), world_size(seats)) == ([("b", 0, 0), ("big", 1, 2)], 6)


def test_a_smaller_job_closes_the_gaps() -> None:
    old = first(3, "a", "b", "c")
    assert next_seats(job(2, 3), old, {"a"}, {}, may_shrink=False) is None
    assert places(next_seats(job(2, 3), old, {"a"}, {}, may_shrink=True)) == [("b", 0, 0), ("c", 1, 2)]
    assert next_seats(job(2, 3), old, {"a", "b"}, {}, may_shrink=True) is None


def test_a_job_that_had_shrunk_grows_again() -> None:
    old = first(2, "a", "b")
    assert places(next_seats(job(1, 3), old, (), pool("c", "d"), may_shrink=True)) == [
        ("a", 0, 0),
        ("b", 1, 2),
        ("c", 2, 4),
    ]


@given(
    low=st.integers(1, 4), more=st.integers(0, 3), standbys=st.integers(0, 5), out=st.sets(st.sampled_from("abcdefg")),
    shrink=st.booleans(),
)  # fmt: skip
def test_seats_are_whole(low: int, more: int, standbys: int, out: set[str], shrink: bool) -> None:
    wanted = job(low, low + more)
    old = first(wanted.max_nodes, *"abcdefg"[: wanted.max_nodes])
    ready = pool(*"tuvwx"[:standbys])
    seats = next_seats(wanted, old, out, ready, may_shrink=shrink)
    kept = [s.node for s in old if s.node not in out]
    enough = wanted.min_nodes if shrink else wanted.max_nodes
    if len(kept) + standbys < enough:
        assert seats is None
        return
    assert seats is not None
    nodes = [s.node for s in seats]
    assert len(set(nodes)) == len(nodes) == min(wanted.max_nodes, len(kept) + standbys)
    assert set(kept) <= set(nodes) <= {*kept, *ready}
    assert [s.first_rank for s in seats] == [2 * i for i in range(len(seats))]
    if len(nodes) == wanted.max_nodes:  # nobody who stays gets another rank
        assert {s.node: s.first_rank for s in seats if s.node in kept} == {
            s.node: s.first_rank for s in old if s.node in kept
        }


def test_with_a_mesh_a_job_shrinks_by_whole_replicas() -> None:
    mesh = (("pp", 2), ("dp", 3), ("tp", 2))  # a replica is two nodes of two ranks
    wide = job(2, 6)
    seats = next_seats(wide, (), (), pool("a", "b", "c", "d", "e", "f"), may_shrink=False, mesh=mesh)
    assert seats is not None
    assert len(places(next_seats(wide, seats, ("b",), {}, may_shrink=True, mesh=mesh))) == 4
    assert next_seats(wide, seats, ("b", "c", "d", "e", "f"), {}, may_shrink=True, mesh=mesh) is None


@pytest.mark.parametrize(
    ("mesh", "nproc", "unit"),
    [
        ((), 8, 1),
        ((("dp", 4), ("fsdp", 8)), 8, 1),  # every rank is a replica
        ((("pp", 2), ("dp", 3), ("tp", 2)), 2, 2),
        ((("dp", 4), ("tp", 2)), 8, 1),  # four replicas on a node
        ((("pp", 3), ("dp", 4), ("tp", 4)), 8, 3),  # on two nodes a third of the second replica would be missing
        ((("pp", 3), ("dp", 8)), 8, 3),
    ],
)
def test_how_many_nodes_hold_whole_replicas(mesh: Dims, nproc: int, unit: int) -> None:
    assert growth_unit(mesh, nproc) == unit
