"""Where two copies of every state lie: on two nodes that are not lost together with its owner, nor with one another."""

from collections import Counter
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.core.snapshots.copy_keepers import choose_keepers
from holdfast.core.snapshots.node_eviction_bonds import copy_bonds, may_leave
from holdfast.core.snapshots.node_triples import place_triples
from holdfast.core.snapshots.peer_placement import (
    Groups,
    choose_peers,
    dense_mesh,
    evicted_together,
    parallel_groups,
    place_groups,
)
from holdfast.core.snapshots.restore_choice import choose_restore
from holdfast.model.job_and_seats import Dims, Seat, world_size
from holdfast.model.state_copy import Copy
from tests.core.test_peer_placement import evictable, seats_at

Keepers = dict[str, tuple[str, ...]]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[tuple[Seat, ...], Dims]:
    """Seats of three to forty nodes, on machines whose switches are known or not, and parallel groups."""
    nproc = draw(st.sampled_from((1, 2, 4)))
    sizes = [draw(st.integers(1, 4)) for _ in range(3)]
    ranks = sizes[0] * sizes[1] * sizes[2] * nproc
    nodes = max(3, ranks // nproc)
    switches = draw(st.integers(0, 5))
    places = [f"s{draw(st.integers(0, switches - 1))}" if switches else "" for _ in range(nodes)]
    mesh = (("pp", sizes[0]), ("dp", sizes[1]), ("tp", sizes[2] * nproc))
    return seats_at(*places, nproc=nproc), mesh if ranks == nodes * nproc else ()


def groups_of(seats: tuple[Seat, ...], mesh: Dims) -> Groups:
    return parallel_groups(dense_mesh(seats, mesh))


@settings(max_examples=300, deadline=None)
@given(job=jobs())
def test_two_keepers_are_two_other_nodes_and_no_eviction_reaches_more_than_it_must(
    job: tuple[tuple[Seat, ...], Dims],
) -> None:
    seats, mesh = job
    kept, exposed = choose_keepers(seats, mesh, 2)
    nodes, nproc, groups = len(seats), seats[0].nproc, groups_of(seats, mesh)
    assert kept.keys() == {seat.node for seat in seats}
    assert all(len({node, *two}) == 3 for node, two in kept.items())
    number = {seat.node: at for at, seat in enumerate(seats)}
    together = evicted_together(nodes, nproc, groups)
    for node, two in kept.items():
        if len(together[number[node]]) < nodes:
            assert any(number[one] not in together[number[node]] for one in two), "one keeper is outside its groups"
    evictions = [{seats[n].node for n in out} for out in evictable(nodes, nproc, groups)]
    lost = [out for out in evictions if any({node, *two} <= out for node, two in kept.items())]
    assert bool(lost) == bool(exposed), "what is not survived is said"


@settings(max_examples=300, deadline=None)
@given(job=jobs())
def test_where_all_three_can_be_apart_they_are_and_everybody_keeps_two(job: tuple[tuple[Seat, ...], Dims]) -> None:
    seats, mesh = job
    nodes, nproc, groups = len(seats), seats[0].nproc, groups_of(seats, mesh)
    wide: Groups = (*groups, *place_groups(seats))
    if not place_triples(world_size(seats), nproc, wide):
        return
    kept, exposed = choose_keepers(seats, mesh, 2)
    assert not exposed
    assert set(Counter(one for two in kept.values() for one in two).values()) == {2}
    number = {seat.node: at for at, seat in enumerate(seats)}
    together = evicted_together(nodes, nproc, wide)
    for node, two in kept.items():
        for one, other in combinations((node, *two), 2):
            assert number[other] not in together[number[one]], (node, two)


@settings(max_examples=200, deadline=None)
@given(count=st.integers(3, 40))
def test_without_groups_everybody_keeps_two(count: int) -> None:
    kept, exposed = choose_keepers(seats_at(*[""] * count), (), 2)
    assert set(Counter(one for two in kept.values() for one in two).values()) == {2} and not exposed


@pytest.mark.parametrize("places", ["aabbcc", "abcabc", "aaabbbccc", "a.b.c."])
def test_both_copies_lie_behind_other_switches(places: str) -> None:
    seats = seats_at(*(place.strip(".") for place in places))
    where = {seat.node: seat.near or (seat.node,) for seat in seats}
    kept, exposed = choose_keepers(seats, (), 2)
    assert exposed == ()
    assert all(len({where[node], *(where[one] for one in two)}) == 3 for node, two in kept.items()), kept


@pytest.mark.parametrize("places", ["aabb", "aaab", "aabbb"])
def test_behind_two_switches_one_of_the_copies_lies_behind_the_other(places: str) -> None:
    seats = seats_at(*places)
    where = {seat.node: seat.near for seat in seats}
    kept, _ = choose_keepers(seats, (), 2)
    assert all({where[one] for one in two} - {where[node]} for node, two in kept.items()), kept


def test_one_copy_is_where_it_always_was_and_fewer_than_three_nodes_keep_one() -> None:
    for count in range(1, 9):
        seats = seats_at(*[""] * count)
        peers, exposed = choose_peers(seats, ())
        alone = {node: (peer,) for node, peer in peers.items()}
        assert choose_keepers(seats, (), 1) == (alone, exposed)
        if count < 3:
            kept, told = choose_keepers(seats, (), 2)
            assert kept == alone and len(told) == (count == 2)


def test_nodes_of_different_sizes_have_two_keepers_as_well() -> None:
    seats = tuple(replace(seat, nproc=1 + at % 2) for at, seat in enumerate(seats_at(*"abcde")))
    kept, _ = choose_keepers(seats, (), 2)
    assert all(len({node, *two}) == 3 for node, two in kept.items())


def held_copies(seats: tuple[Seat, ...], kept: Keepers) -> list[Copy]:
    world = world_size(seats)
    return [
        Copy(node=node, rank=rank, step=7, world=world, whole=node == seat.node, layout="l")
        for seat in seats
        for node in (seat.node, *kept[seat.node])
        for rank in seat.ranks
    ]


def renew(seats: tuple[Seat, ...], gone: set[str]) -> tuple[Seat, ...]:
    return tuple(replace(seat, node=f"new-{seat.node}") if seat.node in gone else seat for seat in seats)


@pytest.mark.parametrize("count", range(3, 9))
def test_any_two_nodes_may_be_lost_at_once(count: int) -> None:
    seats = seats_at(*[""] * count, nproc=2)
    for copies, survived in ((2, True), (1, False)):
        held = held_copies(seats, choose_keepers(seats, (), copies)[0])
        plans = [
            choose_restore(renew(seats, set(gone)), [copy for copy in held if copy.node not in gone]).step == 7
            for gone in combinations([seat.node for seat in seats], 2)
        ]
        assert all(plans) is survived


@pytest.mark.parametrize("lone", [False, True])
@pytest.mark.parametrize("count", range(3, 8))
def test_what_may_go_leaves_a_copy_of_every_state(count: int, lone: bool) -> None:
    """Asked of the planner of restores: with what those hold that stay, and nothing else, everybody has a source."""
    seats = seats_at(*[""] * count)
    kept = choose_keepers(seats, (), 2)[0]
    bound = copy_bonds(seats, (), parity=False, copies=2, lone=lone)
    sure = [
        copy for copy in held_copies(seats, kept) if not lone or copy.whole or copy.node != kept[f"n{copy.rank}"][0]
    ]
    names = [seat.node for seat in seats]
    for asked in chain.from_iterable(combinations(names, size) for size in range(1, count + 1)):
        for lost in ((), asked[:1]):
            going = {*may_leave(asked, bound, lost), *lost}
            left = [copy for copy in sure if copy.node not in going]
            assert choose_restore(renew(seats, going), left).step == 7, (asked, going)
            if not lone and all(not {node, *two} <= {*asked} for node, two in kept.items()):
                assert going == {*asked}, "nobody stays without a reason"


def test_an_owner_and_its_first_keeper_may_go_together_with_two_copies_alone() -> None:
    seats = seats_at(*[""] * 4)
    pair = ("n0", choose_keepers(seats, (), 2)[0]["n0"][0])
    assert may_leave(pair, copy_bonds(seats, (), parity=False, copies=2), ()) == tuple(sorted(pair))
    assert len(may_leave(pair, copy_bonds(seats, (), parity=False, copies=2, lone=True), ())) == 1
    [second] = {*choose_keepers(seats, (), 2)[0]["n0"]} - {*pair}
    assert second not in may_leave((*pair, second), copy_bonds(seats, (), parity=False, copies=2), ())
