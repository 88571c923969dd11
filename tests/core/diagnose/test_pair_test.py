"""The pair test as a plan: every set of up to three bad nodes among up to nine is found, or said not to be found."""

from itertools import combinations

import pytest

from holdfast.core.diagnose.pair_test import PairResult, PairTestResult, PairWave, World, next_wave


def play(
    nodes: list[str],
    bad: set[str],
    broken: set[frozenset[str]] = frozenset(),  # type: ignore[assignment]
) -> tuple[PairTestResult, list[PairWave]]:
    """The whole test with nodes that fail whenever they take part, and links that fail between two."""
    met: list[PairResult] = []
    waves = []
    while isinstance(step := next_wave(nodes, met), PairWave):
        waves.append(step)
        assert len(waves) <= 2 * len(nodes), "it does not come to an end"
        assert step.worlds
        taking_part = [node for world in step.worlds for node in world]
        assert len(taking_part) == len(set(taking_part)), "a node is asked to be in two worlds at once"
        met += [PairResult(world=world, ok=passes(world, bad, broken)) for world in step.worlds]
    return step, waves


def passes(world: World, bad: set[str], broken: set[frozenset[str]]) -> bool:
    return not bad & set(world) and not any(link <= set(world) for link in broken)


@pytest.mark.parametrize("count", range(2, 10))
def test_every_set_of_up_to_three_is_found_or_said_not_to_be(count: int) -> None:
    nodes = [f"n{i}" for i in range(count)]
    for size in range(min(3, count) + 1):
        for chosen in combinations(nodes, size):
            bad = set(chosen)
            answer, waves = play(nodes, bad)
            if answer.unsure:
                # Only where no two good nodes ever met: nothing passed, so there was nobody to compare with.
                assert not answer.bad and set(answer.unsure) == set(nodes)
                assert not any(passes(world, bad, set()) for wave in waves for world in wave.worlds)
            else:
                assert set(answer.bad) == bad
            if size < count // 2:
                # Somebody passes in round one, so round two decides; it comes in waves if good partners are few.
                suspects = [n for w in waves[0].worlds if bad & set(w) for n in w]
                good = count - len(suspects)
                assert len(waves) <= (1 + -(-len(suspects) // good) if bad else 1)
                assert set(answer.bad) == bad


def test_an_odd_count_has_one_world_of_three() -> None:
    wave = next_wave(["a", "b", "c", "d", "e"], [])
    assert isinstance(wave, PairWave)
    assert sorted(map(len, wave.worlds)) == [2, 3]


def test_of_three_one_bad_is_found_by_pairing_anew() -> None:
    for bad in "abc":
        answer, _ = play(["a", "b", "c"], {bad})
        assert set(answer.bad) == {bad}


def test_two_nodes_that_fail_together_are_both_unsure() -> None:
    answer, _ = play(["a", "b"], {"b"})
    assert answer.unsure == ("a", "b") and not answer.bad


def test_few_good_partners_serve_in_waves() -> None:
    nodes = [f"n{i}" for i in range(8)]
    answer, waves = play(nodes, {"n0", "n1", "n2"})
    assert set(answer.bad) == {"n0", "n1", "n2"}
    assert [len(wave.worlds) for wave in waves] == [4, 2, 3, 1]  # who was cleared helps on


def test_a_link_that_fails_between_good_nodes_is_told_as_such() -> None:
    answer, _ = play(["a", "b", "c", "d"], set(), {frozenset({"a", "c"})})
    assert not answer.bad and not answer.unsure
    assert answer.links == (("a", "c"),)
    assert "between a and c" in answer.reason


def test_reasons_go_into_the_answer() -> None:
    met = [PairResult(world=("a", "c"), ok=True), PairResult(world=("b", "d"), ok=False, reason="too slow")]
    met += [PairResult(world=("a", "b"), ok=True), PairResult(world=("c", "d"), ok=False, reason="a bit differs")]
    answer = next_wave(["a", "b", "c", "d"], met)
    assert isinstance(answer, PairTestResult)
    assert list(answer.bad) == ["d"] and answer.bad["d"].endswith(": a bit differs") and " c" in answer.bad["d"]


def test_one_node_has_nobody() -> None:
    answer = next_wave(["a"], [])
    assert isinstance(answer, PairTestResult) and not answer.bad
