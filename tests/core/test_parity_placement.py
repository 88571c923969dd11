"""Two shares laid over one another lie where no eviction reaches two of the three nodes that it takes."""

from collections.abc import Iterator

import pytest

from holdfast.core.snapshots.node_triples import NodeTriples, place_triples
from holdfast.core.snapshots.parity_placement import place_halves
from holdfast.core.snapshots.peer_placement import Groups, evicted_together, parallel_groups
from holdfast.model.job_and_seats import Seat
from tests.core.test_peer_placement import ORDERS, WORLDS, evictable, layouts, seats_at


def laid_out(world: int) -> Iterator[tuple[int, Groups]]:
    for sizes in layouts(world):
        for order in ORDERS:
            for nproc in (n for n in (1, 2, 4, 8) if world % n == 0 and world // n >= 2):
                yield nproc, parallel_groups(tuple((name, sizes[name]) for name in order))


def recoverable(laid: NodeTriples, node: int, out: set[int]) -> bool:
    """Whether both halves of a lost node are to be had: their keepers are there, and those they were laid over."""
    first, second = laid.first.index(node), laid.second.index(node)
    return not {first, second, laid.second[first], laid.first[second]} & out


@pytest.mark.parametrize("world", WORLDS)
def test_no_loss_of_a_node_or_a_group_loses_a_shard(world: int) -> None:
    for nproc, groups in laid_out(world):
        nodes, laid = world // nproc, place_triples(world, nproc, groups)
        if laid is None:
            continue  # the rest of the tests sees to it that this is rare
        assert sorted(laid.first) == sorted(laid.second) == list(range(nodes)), (
            "each keeps for two, and one half of each"
        )
        for out in (*evictable(nodes, nproc, groups), *({node} for node in range(nodes))):
            assert all(recoverable(laid, node, out) for node in out), (nproc, groups, out)


def test_how_often_it_fits() -> None:
    """Where every node has two others that it could go with, nearly always all find them at once."""
    fitting = missed = 0
    for world in (12, 16, 24, 27, 36, 48, 64):
        for nproc, groups in laid_out(world):
            nodes = world // nproc
            shared = evicted_together(nodes, nproc, groups)
            if all(triple(node, shared) for node in range(nodes)):
                fitting += 1
                missed += place_triples(world, nproc, groups) is None
    assert fitting > 500 and missed < 0.01 * fitting, (missed, fitting)


def triple(node: int, shared: tuple[frozenset[int], ...]) -> bool:
    free = [other for other in range(len(shared)) if other not in shared[node]]
    return any(two not in shared[one] for one in free for two in free)


@pytest.mark.parametrize("nodes", range(3, 40))
def test_without_groups_it_always_fits(nodes: int) -> None:
    laid = place_triples(nodes, 1, ())
    assert laid is not None
    if nodes % 3 == 0:  # three keep for each other and for nobody else
        triples = {frozenset((keeper, laid.first[keeper], laid.second[keeper])) for keeper in range(nodes)}
        assert len(triples) == nodes // 3


def seats(*nproc: int) -> tuple[Seat, ...]:
    return tuple(
        Seat(node=f"n{number}", group_rank=number, first_rank=sum(nproc[:number]), nproc=count)
        for number, count in enumerate(nproc)
    )


def test_both_ends_name_the_same_pair() -> None:
    """Who sends a first half names whose second half it goes with, and the other way round."""
    laid, why = place_halves(seats(2, 2, 2, 2), ())
    assert why == ""
    pairs: dict[str, set[tuple[int, int]]] = {}
    for number, (first, second) in enumerate(laid[f"n{number}"] for number in range(4)):
        pairs.setdefault(first.keeper, set()).add((2 * number, first.beside))
        pairs.setdefault(second.keeper, set()).add((second.beside, 2 * number))
    assert len(pairs) == 4 and all(len(found) == 1 for found in pairs.values()), pairs


@pytest.mark.parametrize(
    ("nproc", "mesh", "why"),
    [
        ((1,), (), ""),
        ((1, 1), (), "it takes 3 nodes"),
        ((1, 2, 1), (), "nodes have different numbers of ranks"),
        ((1, 1, 1, 1), (("pp", 2), ("dp", 2)), "too many nodes could be evicted together"),
    ],
)
def test_why_it_is_not_done_is_said(nproc: tuple[int, ...], mesh: tuple[tuple[str, int], ...], why: str) -> None:
    laid, said = place_halves(seats(*nproc), mesh)
    assert laid == {}
    assert said == (f"backup.parity: {why}, so whole copies are kept" if why else "")


def test_halves_lie_behind_three_switches_where_that_is_possible() -> None:
    halves, why = place_halves(seats_at(*"aabbcc"), ())
    place = dict(zip((f"n{n}" for n in range(6)), "aabbcc", strict=True))
    node_at = {n: f"n{n}" for n in range(6)}
    assert not why
    for node, two in halves.items():
        for half in two:
            assert len({place[node], place[half.keeper], place[node_at[half.beside]]}) == 3
    assert place_halves(seats_at(*"aab"), ())[0], "else as without places"
