"""Dual-phase replay against every fault there can be, with lost and late answers."""

from collections.abc import Callable, Iterable
from itertools import combinations
from random import Random

import pytest

from holdfast.core.diagnose import chances
from holdfast.core.diagnose.grid import Plan, fit, plan
from holdfast.core.diagnose.replay import Group, How, Replay, ReplayLimits, Ruling, Wave

SURE = ReplayLimits(q=1.0)


def names(count: int) -> list[str]:
    return [f"n{x}" for x in range(count)]


def grid(count: int, m: int, n: int | None = None) -> Plan:
    return plan(names(count), m, n or count // m)


def run(replay: Replay, faulty: Callable[[Group], bool | None], most: int = 10_000) -> Ruling:
    for _ in range(most):
        match replay.next():
            case Ruling() as ruling:
                return ruling
            case Wave(groups=groups):
                assert groups
                for group in groups:
                    replay.heard(group, faulty(group))
    raise AssertionError("it does not end")


def holding(bad: Iterable[str]) -> Callable[[Group], bool]:
    struck = set(bad)
    return lambda group: bool(struck & set(group.nodes))


def test_every_single_node_is_named_by_every_grid() -> None:
    for count in range(2, 65):
        for m in range(1, count + 1):
            if not (m <= count // m and count // m > 1):
                continue
            made = grid(count, m)
            for node in names(count):
                ruling = run(Replay(made, SURE), holding([node]))
                assert (ruling.how, ruling.nodes) == (How.ONE, (node,)), (count, m, node)
                assert ruling.repeats == (1, 1)


@pytest.mark.parametrize("count", [4, 5, 6, 7, 9, 11, 12, 13, 16, 20, 23, 24])
def test_two_faulty_nodes_are_in_the_set(count: int) -> None:
    m, n = fit(count)
    made, sizes = grid(count, m, n), []
    for pair in combinations(names(count), 2):
        ruling = run(Replay(made, SURE), holding(pair))
        if ruling.how is How.EVERYWHERE:  # two groups, and both failed
            assert n == 2
            continue
        assert ruling.how is How.SOME
        assert set(pair) <= set(ruling.nodes)
        sizes.append(len(ruling.nodes))
    assert not sizes or sum(sizes) / len(sizes) <= 4


def test_how_large_the_set_is() -> None:
    """In the published grid of 4 by 6: 2.78 suspects on average."""
    made = grid(24, 4)
    sizes = [len(run(Replay(made, SURE), holding(pair)).nodes) for pair in combinations(names(24), 2)]
    assert sum(sizes) / len(sizes) == pytest.approx(2.78, abs=0.01)


def test_nothing_shows() -> None:
    ruling = run(Replay(grid(12, 3), ReplayLimits(most=9)), lambda group: False)
    assert (ruling.how, ruling.nodes, ruling.repeats) == (How.NOBODY, (), (9, 0))
    assert "shows in more than 0.28 of them is out of the question (95%)" in ruling.reason
    assert "is now 9.1%" in ruling.reason
    known = run(Replay(grid(12, 3), ReplayLimits(q=0.5)), lambda group: False)
    assert known.repeats == (6, 0) and "0.5 of them, 98% would" in known.reason


def test_it_shows_everywhere() -> None:
    for when in (1, 2):
        ruling = run(Replay(grid(12, 3), SURE), lambda g, when=when: g.phase == when or "n0" in g.nodes)  # type: ignore[misc]
        assert (ruling.how, ruling.nodes) == (How.EVERYWHERE, ())
        assert f"all 4 groups of phase {when}" in ruling.reason and "not a machine" in ruling.reason


def test_it_does_not_show_again() -> None:
    ruling = run(Replay(grid(12, 3), ReplayLimits(most=4)), lambda group: group.name == "h1")
    assert (ruling.how, ruling.nodes) == (How.SOME, ("n3", "n4", "n5"))
    assert ruling.repeats == (1, 4)
    assert "not again in 4 repeats" in ruling.reason


def test_groups_that_have_nobody_in_common() -> None:
    ruling = run(Replay(grid(20, 4), SURE), lambda group: group.name in ("h0", "v4"))
    assert ruling.how is How.SOME
    assert set(ruling.nodes) == {"n0", "n1", "n2", "n3", "n4", "n9", "n14", "n19"}
    assert "more than one must be faulty" in ruling.reason


def test_an_answer_that_is_lost_is_asked_for_again() -> None:
    replay = Replay(grid(4, 2), SURE)
    first = replay.next()
    assert isinstance(first, Wave) and [g.name for g in first.groups] == ["h0", "h1"]
    assert replay.next() == first, "asking changes nothing"
    replay.heard(first.groups[0], False)
    replay.heard(first.groups[1], None)
    again = replay.next()
    assert again == Wave(groups=first.groups[1:])
    replay.heard(first.groups[1], True)
    second = replay.next()
    assert isinstance(second, Wave) and second.groups[0].phase == 2
    replay.heard(first.groups[0], True)  # late, and not what it said before
    replay.heard(second.groups[0], False)
    replay.heard(second.groups[0], True)  # twice
    replay.heard(second.groups[1], True)
    ruling = replay.next()
    assert isinstance(ruling, Ruling) and ruling.nodes == ("n3",)
    replay.heard(second.groups[1], False)
    assert replay.next() == ruling


def test_who_never_answers_is_neither_blamed_nor_cleared() -> None:
    asked: list[str] = []

    def lost(group: Group) -> bool | None:
        asked.append(group.name)
        return None if group.name == "h0" else False

    ruling = run(Replay(grid(9, 3), ReplayLimits(most=2, tries=3)), lost)
    assert ruling.how is How.NOBODY
    assert ruling.unheard == ("n0", "n1", "n2")
    assert "3 nodes were in groups that never answered" in ruling.reason
    assert asked.count("h0") == 6 and asked.count("h1") == 2


@pytest.mark.parametrize("count", [12, 13])
def test_answers_lost_by_chance_name_nobody_wrongly(count: int) -> None:
    rng = Random(count)
    m, n = fit(count)
    named = 0
    for trial in range(300):
        bad = f"n{trial % count}"
        ruling = run(Replay(grid(count, m, n), SURE), lambda g, bad=bad: None if rng.random() < 0.4 else bad in g.nodes)  # type: ignore[misc]
        if ruling.how is How.ONE:
            named += ruling.nodes == (bad,)
            assert ruling.nodes == (bad,)
        elif ruling.how is How.SOME:
            assert bad in ruling.nodes
        else:
            assert bad in ruling.unheard
    assert named > 230


@pytest.mark.parametrize(("q", "most"), [(1.0, 20), (0.5, 1), (0.5, 3), (0.2, 5), (0.2, 20)])
def test_success_is_as_reckoned(q: float, most: int) -> None:
    rng = Random(7)
    limits = ReplayLimits(q=q, most=most)
    repeats = chances.repeats(q, limits.confidence, most)
    trials = 2000
    found = 0
    for _ in range(trials):
        bad = f"n{rng.randrange(24)}"
        ruling = run(Replay(grid(24, 4), limits), lambda g, bad=bad: bad in g.nodes and rng.random() < q)  # type: ignore[misc]
        found += (ruling.how, ruling.nodes) == (How.ONE, (bad,))
    low, high = chances.wilson(found, trials, z=3.5)
    assert low <= chances.success(q, repeats) <= high


def test_q_unknown_reaches_its_confidence() -> None:
    """Every q alike: as the repeats of the second phase follow from the first, few are named in one phase only."""
    rng, limits = Random(3), ReplayLimits(most=60)
    shown = found = 0
    for _ in range(1500):
        bad, q = f"n{rng.randrange(12)}", rng.random()
        ruling = run(Replay(grid(12, 3), limits), lambda g, bad=bad, q=q: bad in g.nodes and rng.random() < q)  # type: ignore[misc]
        shown += ruling.how is not How.NOBODY
        found += ruling.nodes == (bad,)
    assert shown / 1500 > 0.96
    assert found / shown > limits.confidence**0.5 - 0.015
