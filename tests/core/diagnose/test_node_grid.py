"""Groups of a replay: two of different phases share one node at most, and every one holds whole replicas."""

from collections.abc import Iterator
from math import prod

import pytest

from holdfast.core.replay.node_grid import (
    DATA_PARALLEL,
    ReplayPlan,
    UnfitError,
    fit_grid,
    nodes_per_replica,
    plan_grid,
    shrink_mesh,
)
from holdfast.model.job_and_seats import Dims


def names(count: int) -> list[str]:
    return [f"n{x}" for x in range(count)]


def test_the_published_example() -> None:
    """m=4, n=6: machine 13 is in the fourth horizontal and the second vertical group."""
    found = plan_grid(names(24), 4, 6)
    first, second = dict(found.first[0]), dict(found.second[0])
    assert first["h3"] == ("n12", "n13", "n14", "n15")
    assert second["v1"] == ("n1", "n7", "n13", "n19")
    assert found.left_over == ()


@pytest.mark.parametrize(("m", "n"), [(6, 4), (2, 1), (3, 2)])
def test_more_nodes_in_a_group_than_groups_are_refused(m: int, n: int) -> None:
    shared = -(-m // n)  # nodes of a faulty group of each phase
    why = rf" {m} groups .* {n}: .* {shared} nodes" if n > 1 else rf"^{m} nodes .* {n} groups of {m}:"
    with pytest.raises(UnfitError, match=why):
        plan_grid(names(m * n), m, n)


def test_why_they_are_refused() -> None:
    """With m=6 and n=4 sixteen of twenty-four machines could not be told from another one."""
    seen: dict[tuple[int, int], int] = {}
    for x in range(24):
        seen[x // 6, x % 4] = seen.get((x // 6, x % 4), 0) + 1
    assert sum(count for count in seen.values() if count > 1) == 16


@pytest.mark.parametrize(("count", "m", "n"), [(4, 2, 3), (3, 0, 3), (10, 2, 2)])
def test_what_else_is_refused(count: int, m: int, n: int) -> None:
    with pytest.raises(UnfitError):
        plan_grid(names(count), m, n)
    with pytest.raises(UnfitError, match="twice"):
        plan_grid(["a", "a"], 1, 2)


def grids(most: int) -> Iterator[ReplayPlan]:
    for count in range(2, most + 1):
        for m in range(1, count + 1):
            n = count // m
            if m <= n and n > 1:
                yield plan_grid(names(count), m, n)


def test_two_groups_share_one_node_at_most() -> None:
    for found in grids(64):
        firsts = [(name, set(nodes)) for wave in found.first for name, nodes in wave]
        for name, nodes in ((name, set(nodes)) for wave in found.second for name, nodes in wave):
            for other, members in firsts:
                # A left-over node in its own group is in no horizontal one: only those that fill up meet there.
                assert len(nodes & members) <= 1 or (name[0] == "s" and other[0] == "h"), (found.m, found.n)


def test_everybody_is_in_a_group_of_each_phase_and_all_groups_are_alike() -> None:
    for found in grids(64):
        everybody = {node for wave in found.first for _, nodes in wave for node in nodes}
        for waves in (found.first, found.second):
            groups = [nodes for wave in waves for _, nodes in wave]
            assert {len(nodes) for nodes in groups} == {found.m}
            assert {node for nodes in groups for node in nodes} == everybody
            for wave in waves:  # nobody is asked to be in two places at once
                members = [node for _, nodes in wave for node in nodes]
                assert len(set(members)) == len(members)
        assert len({name for wave in (*found.first, *found.second) for name, _ in wave}) == sum(
            len(wave) for wave in (*found.first, *found.second)
        )


@pytest.mark.parametrize(
    ("count", "whole", "wanted"),
    [
        (24, 1, (4, 6)),
        (12, 1, (3, 4)),
        (1200, 8, (24, 50)),
        (13, 1, (3, 4)),
        (7, 1, (2, 3)),
        (3, 1, (1, 3)),
        (2, 1, (1, 2)),
        (12, 2, (2, 6)),
        (1201, 1, (30, 40)),
    ],
)
def test_fit(count: int, whole: int, wanted: tuple[int, int]) -> None:
    m, n = fit_grid(count, whole)
    assert (m, n) == wanted
    assert m % whole == 0 and m <= n and m * n <= count


@pytest.mark.parametrize(("count", "whole"), [(1, 1), (8, 4), (3, 2), (15, 4), (0, 1)])
def test_what_does_not_fit(count: int, whole: int) -> None:
    with pytest.raises(UnfitError, match=f"that takes {max(2, whole * whole)}"):
        fit_grid(count, whole)
    assert fit_grid(max(2, whole * whole), whole)


def meshes(most: int) -> Iterator[Dims]:
    for pp in range(1, most + 1):
        for dp in range(1, most // pp + 1):
            for tp in range(1, most // (pp * dp) + 1):
                yield (("pp", pp), ("dp", dp), ("tp", tp))


def test_every_group_holds_whole_replicas() -> None:
    fitted = 0
    for mesh in meshes(64):
        world = prod(size for _, size in mesh)
        replica = prod(size for name, size in mesh if name not in DATA_PARALLEL)
        for nproc in (p for p in (1, 2, 3, 4, 8) if world % p == 0):
            try:
                m, n = fit_grid(world // nproc, nodes_per_replica(mesh, nproc))
            except UnfitError:
                continue
            fitted += 1
            for _, nodes in (group for wave in plan_grid(names(world // nproc), m, n).first for group in wave):
                ranks = len(nodes) * nproc
                assert ranks % replica == 0
                small = dict(shrink_mesh(mesh, ranks))
                assert (small["pp"], small["tp"]) == (dict(mesh)["pp"], dict(mesh)["tp"])
                assert prod(small.values()) == ranks
    assert fitted > 500


def test_meshes_of_groups() -> None:
    assert shrink_mesh((), 4) == (("dp", 4),)
    assert shrink_mesh((("dp", 6), ("tp", 2)), 8) == (("dp", 4), ("tp", 2))
    assert shrink_mesh((("dp_replicate", 4), ("dp_shard", 8)), 16) == (("dp_replicate", 2), ("dp_shard", 8))
    assert shrink_mesh((("pp", 2), ("tp", 4)), 16) == (("dp", 2), ("pp", 2), ("tp", 4))
    with pytest.raises(UnfitError, match=r"^6 ranks .* 4$"):
        shrink_mesh((("dp", 4), ("tp", 4)), 6)
    assert nodes_per_replica((("dp_replicate", 4), ("dp_shard", 8)), 4) == 2
    assert nodes_per_replica((("pp", 3), ("dp", 4)), 2) == 3
