"""Dual-phase replay against every fault there can be, with lost and late answers."""

from collections.abc import Callable, Iterable
from itertools import combinations
from random import Random

import pytest

from holdfast.core.replay import detection_odds
from holdfast.core.replay.node_grid import ReplayPlan, fit_grid, plan_grid
from holdfast.core.replay.regrouped_replay import (
    DualPhaseReplay,
    ReplayGroup,
    ReplayLimits,
    ReplayRuling,
    ReplayWave,
    RulingKind,
)

SURE = ReplayLimits(q=1.0)


def names(count: int) -> list[str]:
    return [f"n{x}" for x in range(count)]


def grid(count: int, m: int, n: int | None = None) -> ReplayPlan:
    return plan_grid(names(count), m, n or count // m)


def run(replay: DualPhaseReplay, faulty: Callable[[ReplayGroup], bool | None], most: int = 10_000) -> ReplayRuling:
    for _ in range(most):
        match replay.next_wave():
            case ReplayRuling() as ruling:
                return ruling
            case ReplayWave(groups=groups):
                assert groups
                for group in groups:
                    replay.on_group_result(group, faulty(group))
    raise AssertionError("it does not end")


def holding(bad: Iterable[str]) -> Callable[[ReplayGroup], bool]:
    struck = set(bad)
    return lambda group: bool(struck & set(group.nodes))


def test_every_single_node_is_named_by_every_grid() -> None:
    for count in range(2, 65):
        for m in range(1, count + 1):
            if not (m <= count // m and count // m > 1):
                continue
            made = grid(count, m)
            for node in names(count):
                ruling = run(DualPhaseReplay(made, SURE), holding([node]))
                assert (ruling.how, ruling.nodes) == (RulingKind.ONE, (node,)), (count, m, node)
                assert ruling.repeats == (1, 1)


@pytest.mark.parametrize("count", [4, 5, 6, 7, 9, 11, 12, 13, 16, 20, 23, 24])
def test_two_faulty_nodes_are_in_the_set(count: int) -> None:
    m, n = fit_grid(count)
    made, sizes = grid(count, m, n), []
    for pair in combinations(names(count), 2):
        ruling = run(DualPhaseReplay(made, SURE), holding(pair))
        if ruling.how is RulingKind.EVERYWHERE:  # two groups, and both failed
            assert n == 2
            continue
        assert ruling.how is RulingKind.SOME
        assert set(pair) <= set(ruling.nodes)
        sizes.append(len(ruling.nodes))
    assert not sizes or sum(sizes) / len(sizes) <= 4


def test_how_large_the_set_is() -> None:
    """In the published grid of 4 by 6: 2.78 suspects on average."""
    made = grid(24, 4)
    sizes = [len(run(DualPhaseReplay(made, SURE), holding(pair)).nodes) for pair in combinations(names(24), 2)]
    assert sum(sizes) / len(sizes) == pytest.approx(2.78, abs=0.01)


def test_nothing_shows() -> None:
    ruling = run(DualPhaseReplay(grid(12, 3), ReplayLimits(most=9)), lambda group: False)
    assert (ruling.how, ruling.nodes, ruling.repeats) == (RulingKind.NOBODY, (), (9, 0))
    assert all(number in ruling.reason for number in (" 0.28 ", "(95%)", " 9.1%"))
    known = run(DualPhaseReplay(grid(12, 3), ReplayLimits(q=0.5)), lambda group: False)
    assert known.repeats == (6, 0) and " 0.5 " in known.reason and " 98% " in known.reason


def test_it_shows_everywhere() -> None:
    for when in (1, 2):
        ruling = run(DualPhaseReplay(grid(12, 3), SURE), lambda g, when=when: g.phase == when or "n0" in g.nodes)  # type: ignore[misc]
        assert (ruling.how, ruling.nodes) == (RulingKind.EVERYWHERE, ())
        assert " 4 " in ruling.reason and f"phase {when}" in ruling.reason


def test_it_does_not_show_again() -> None:
    ruling = run(DualPhaseReplay(grid(12, 3), ReplayLimits(most=4)), lambda group: group.name == "h1")
    assert (ruling.how, ruling.nodes) == (RulingKind.SOME, ("n3", "n4", "n5"))
    assert ruling.repeats == (1, 4)


def test_groups_that_have_nobody_in_common() -> None:
    ruling = run(DualPhaseReplay(grid(20, 4), SURE), lambda group: group.name in ("h0", "v4"))
    assert ruling.how is RulingKind.SOME
    assert set(ruling.nodes) == {"n0", "n1", "n2", "n3", "n4", "n9", "n14", "n19"}


def test_an_answer_that_is_lost_is_asked_for_again() -> None:
    replay = DualPhaseReplay(grid(4, 2), SURE)
    first = replay.next_wave()
    assert isinstance(first, ReplayWave) and [g.name for g in first.groups] == ["h0", "h1"]
    assert replay.next_wave() == first, "asking changes nothing"
    replay.on_group_result(first.groups[0], False)
    replay.on_group_result(first.groups[1], None)
    again = replay.next_wave()
    assert again == ReplayWave(groups=first.groups[1:])
    replay.on_group_result(first.groups[1], True)
    second = replay.next_wave()
    assert isinstance(second, ReplayWave) and second.groups[0].phase == 2
    replay.on_group_result(first.groups[0], True)  # late, and not what it said before
    replay.on_group_result(second.groups[0], False)
    replay.on_group_result(second.groups[0], True)  # twice
    replay.on_group_result(second.groups[1], True)
    ruling = replay.next_wave()
    assert isinstance(ruling, ReplayRuling) and ruling.nodes == ("n3",)
    replay.on_group_result(second.groups[1], False)
    assert replay.next_wave() == ruling


def test_who_never_answers_is_neither_blamed_nor_cleared() -> None:
    asked: list[str] = []

    def lost(group: ReplayGroup) -> bool | None:
        asked.append(group.name)
        return None if group.name == "h0" else False

    ruling = run(DualPhaseReplay(grid(9, 3), ReplayLimits(most=2, tries=3)), lost)
    assert ruling.how is RulingKind.NOBODY
    assert ruling.unheard == ("n0", "n1", "n2")
    assert "3 nodes" in ruling.reason
    assert asked.count("h0") == 6 and asked.count("h1") == 2


@pytest.mark.parametrize("count", [12, 13])
def test_answers_lost_by_chance_name_nobody_wrongly(count: int) -> None:
    rng = Random(count)
    m, n = fit_grid(count)
    named = 0
    for trial in range(300):
        bad = f"n{trial % count}"
        replay = DualPhaseReplay(grid(count, m, n), SURE)
        ruling = run(replay, lambda g, bad=bad: None if rng.random() < 0.4 else bad in g.nodes)  # type: ignore[misc]
        if ruling.how is RulingKind.ONE:
            named += ruling.nodes == (bad,)
            assert ruling.nodes == (bad,)
        elif ruling.how is RulingKind.SOME:
            assert bad in ruling.nodes
        else:
            assert bad in ruling.unheard
    assert named > 230


@pytest.mark.parametrize(("q", "most"), [(1.0, 20), (0.5, 1), (0.5, 3), (0.2, 5), (0.2, 20)])
def test_success_is_as_reckoned(q: float, most: int) -> None:
    rng = Random(7)
    limits = ReplayLimits(q=q, most=most)
    repeats = detection_odds.repeats_needed(q, limits.confidence, most)
    trials = 2000
    found = 0
    for _ in range(trials):
        bad = f"n{rng.randrange(24)}"
        ruling = run(DualPhaseReplay(grid(24, 4), limits), lambda g, bad=bad: bad in g.nodes and rng.random() < q)  # type: ignore[misc]
        found += (ruling.how, ruling.nodes) == (RulingKind.ONE, (bad,))
    low, high = detection_odds.wilson_interval(found, trials, z=3.5)
    assert low <= detection_odds.dual_phase_odds(q, repeats) <= high


def test_q_unknown_reaches_its_confidence() -> None:
    """Every q alike: as the repeats of the second phase follow from the first, few are named in one phase only."""
    rng, limits = Random(3), ReplayLimits(most=60)
    shown = found = 0
    for _ in range(1500):
        bad, q = f"n{rng.randrange(12)}", rng.random()
        ruling = run(DualPhaseReplay(grid(12, 3), limits), lambda g, bad=bad, q=q: bad in g.nodes and rng.random() < q)  # type: ignore[misc]
        shown += ruling.how is not RulingKind.NOBODY
        found += ruling.nodes == (bad,)
    assert shown / 1500 > 0.96
    assert found / shown > limits.confidence**0.5 - 0.015
