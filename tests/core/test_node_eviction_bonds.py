"""Who may leave at once, and that what is then left holds every rank's state."""

from itertools import combinations

import pytest
from msgspec.structs import replace

from holdfast.core.snapshots.node_eviction_bonds import copy_bonds, may_leave
from holdfast.core.snapshots.peer_placement import choose_peers
from holdfast.core.snapshots.restore_choice import choose_restore
from holdfast.model.job_and_seats import Seat
from holdfast.model.state_copy import Copy


def seats(count: int, nproc: int = 2) -> tuple[Seat, ...]:
    return tuple(Seat(node=f"n{i}", group_rank=i, first_rank=i * nproc, nproc=nproc) for i in range(count))


@pytest.mark.parametrize("count", range(2, 9))
def test_what_may_go_leaves_a_copy_of_every_state(count: int) -> None:
    """Asked of the planner of restores: with what those hold that stay, and nothing else, everybody has a source."""
    here = seats(count)
    keeper = choose_peers(here, ())[0]
    bound = copy_bonds(here, (), parity=False)
    held = [
        Copy(node=node, rank=rank, step=7, world=2 * count, whole=node == seat.node, layout="l")
        for seat in here
        for node in (seat.node, keeper[seat.node])
        for rank in range(seat.first_rank, seat.first_rank + seat.nproc)
    ]
    for size in range(1, count):
        for asked in combinations([seat.node for seat in here], size):
            going = may_leave(asked, bound, ())
            assert going, "the first may always go"
            left = [copy for copy in held if copy.node not in going]
            new = tuple(replace(s, node=f"new-{s.node}") if s.node in going else s for s in here)
            assert choose_restore(new, left).step == 7, (asked, going)
            if all(keeper[node] not in asked for node in asked):
                assert going == tuple(sorted(asked)), "nobody stays without a reason"


def test_beside_what_is_lost_nobody_goes_whose_other_copy_was_there() -> None:
    bound = copy_bonds(seats(4), (), parity=False)  # n0 and n2 keep for each other, n1 and n3 too
    assert may_leave(("n0",), bound, {"n2"}) == ()
    assert may_leave(("n0",), bound, {"n1"}) == ("n0",)
    assert may_leave(("n0", "n1"), bound, {"n0"}) == ("n0", "n1"), "what is lost is lost"


def test_who_comes_first_has_the_choice() -> None:
    bound = copy_bonds(seats(4), (), parity=False)
    assert may_leave(("n2", "n0"), bound, ()) == ("n2",)


def test_parity_binds_three() -> None:
    bound = copy_bonds(seats(6), (), parity=True)
    assert all(len(others) >= 2 for others in bound.values())
    assert all(frozenset({node}) in bound[other] for node, others in bound.items() for [other] in others)
    whole = copy_bonds(seats(2), (), parity=True)  # too few for it: whole copies
    assert whole == {"n0": {frozenset({"n1"})}, "n1": {frozenset({"n0"})}}


def test_a_single_node_is_bound_to_nobody() -> None:
    assert copy_bonds(seats(1), (), parity=False) == {"n0": set()}
    assert copy_bonds(seats(1), (), parity=True) == {"n0": set()}
    assert copy_bonds((), (), parity=True) == {}
