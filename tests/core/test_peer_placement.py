"""Backups lie where eviction of any one group cannot reach both the owner and the copy."""

from collections.abc import Iterator

import pytest

from holdfast.core.snapshots.peer_placement import Groups, choose_peers, find_exposures, parallel_groups, place_copies
from holdfast.model.job_and_seats import Seat

# Of all up to 64, the small ones and those with the most divisors; the others are slow.
QUICK = (*range(2, 17), 24, 27, 36)
WORLDS = [pytest.param(world, marks=() if world in QUICK else pytest.mark.slow) for world in range(2, 65)]
ORDERS = (("tp", "dp", "pp"), ("tp", "pp", "dp"), ("dp", "tp", "pp"))


def layouts(world: int) -> Iterator[dict[str, int]]:
    for tp in (d for d in range(1, world + 1) if world % d == 0):
        for pp in (d for d in range(1, world // tp + 1) if world // tp % d == 0):
            yield {"tp": tp, "pp": pp, "dp": world // tp // pp}


def evictable(nodes: int, nproc: int, groups: Groups) -> Iterator[set[int]]:
    """The sets of nodes that go together: of every group that does not span all nodes."""
    for _, members in groups:
        for ranks in members:
            out = {rank // nproc for rank in ranks}
            if len(out) < nodes:
                yield out


def survives(partner: tuple[int, ...], nproc: int, out: set[int]) -> bool:
    return all(rank // nproc not in out or keeper // nproc not in out for rank, keeper in enumerate(partner))


@pytest.mark.parametrize("world", WORLDS)
def test_no_eviction_of_a_group_loses_a_shard_where_that_is_possible(world: int) -> None:
    for sizes in layouts(world):
        for order in ORDERS:
            groups = parallel_groups(tuple((name, sizes[name]) for name in order))
            for nproc in (n for n in (1, 2, 4, 8) if world % n == 0 and world // n >= 2):
                check(world, nproc, groups)


def check(world: int, nproc: int, groups: Groups) -> None:
    nodes = world // nproc
    backups = place_copies(world, nproc, groups)
    keepers = [keeper // nproc for keeper in backups.partner]
    assert all(keeper != rank // nproc for rank, keeper in enumerate(keepers)), "a copy on the owner's own node"
    evictions = list(evictable(nodes, nproc, groups))
    lost = [out for out in evictions if not survives(backups.partner, nproc, out)]
    # Somebody who shares a group with every other node cannot be safe; else everybody must be.
    together = [set().union(*(out for out in evictions if node in out), {node}) for node in range(nodes)]
    if all(len(others) < nodes for others in together):
        assert not lost and not backups.exposed, (world, nproc, groups)
    assert bool(lost) == bool(backups.exposed), "what is not survived is said"


def test_the_published_example() -> None:
    """TP 2, DP 2, PP 4 on nodes of two ranks: ranks 8 and 9 keep outside their groups."""
    groups = parallel_groups((("tp", 2), ("dp", 2), ("pp", 4)))
    backups = place_copies(16, 2, groups)
    assert backups.exposed == ()
    assert len(set(backups.partner)) == 16, "each keeps for one other"


def test_one_group_over_all_nodes_takes_a_neighbour() -> None:
    backups = place_copies(8, 2, parallel_groups((("dp", 8),)))
    assert backups.exposed == ()  # evicting all nodes is not eviction
    assert sorted(backups.partner) == list(range(8))


def test_one_node_says_so() -> None:
    placed = place_copies(4, 4, ())
    assert placed.partner == (0, 1, 2, 3)
    assert placed.exposed == ("there is one node only: its loss loses every snapshot",)


def test_exposure_is_told_in_words() -> None:
    groups = (("pp", ((0, 1), (2,))),)
    assert find_exposures(3, 1, groups, (1, 2, 0)) == (
        "evicting pp group 0 (nodes [0, 1]) would lose a snapshot and its copy",
    )


def seats_at(*places: str, nproc: int = 1) -> tuple[Seat, ...]:
    """Seats of nodes in these places; "": where its machine is is not known."""
    return tuple(
        Seat(node=f"n{n}", group_rank=n, first_rank=n * nproc, nproc=nproc, near=("row", place) if place else ())
        for n, place in enumerate(places)
    )


@pytest.mark.parametrize("places", ["aabb", "abab", "aaabbb", "aabbcc", "aa..bb", "aab"])
def test_a_copy_lies_behind_another_switch_where_that_is_known(places: str) -> None:
    seats = seats_at(*(place.strip(".") for place in places))
    where = {seat.node: seat.near or (seat.node,) for seat in seats}
    peers, exposed = choose_peers(seats, ())
    assert exposed == () and all(where[node] != where[peer] for node, peer in peers.items()), peers


def test_groups_that_are_evicted_come_before_places_that_may_be_lost() -> None:
    seats = seats_at("a", "b", "a", "b")  # each place is a whole group of the other dimension
    mesh = (("pp", 2), ("dp", 2))
    assert choose_peers(seats, mesh) == choose_peers(seats_at("", "", "", ""), mesh)
    assert choose_peers(seats_at("a", "a", "a"), ())[1] == (), "what takes all nodes leaves no copy anyway"
