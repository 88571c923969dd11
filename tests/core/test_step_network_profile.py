import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.snapshots.step_network_profile import (
    PARTS,
    SAMPLES,
    Gap,
    NetworkSample,
    StepGaps,
    StepNetworkProfile,
    shared_gaps,
)


def looks_at(
    busy: Sequence[Gap],
    step_s: float = 0.4,
    count: int = SAMPLES,
    *,
    vary: float = 0.0,
    seed: int = 0,
    start: int = 10,
) -> list[NetworkSample]:
    """Looks at steps of which collectives take these shares, about 32 at each."""
    rng, at, step = random.Random(seed), 100.0, start
    found: list[NetworkSample] = []
    while len(found) < count:
        length_s = step_s * (1 + rng.uniform(-vary, vary))
        for number in range(PARTS):
            into = (number + rng.random()) / PARTS
            is_busy = any(begin <= into < end for begin, end in busy)
            found.append(NetworkSample(step, at, at + into * length_s, is_busy))
        at, step = at + length_s, step + 1
    return found[:count]


def profile_of(samples: Sequence[NetworkSample]) -> StepGaps:
    profile = StepNetworkProfile()
    for at in range(0, len(samples), 50):
        profile.add_samples(samples[at : at + 50])
    return profile.read()


def test_the_gaps_are_where_no_collective_is() -> None:
    found = profile_of(looks_at([(0.5, 0.75)]))
    assert found.why == "" and found.step_s == pytest.approx(0.4)
    (first, second) = found.gaps
    assert first[0] == 0 and 0.16 < first[1] <= 0.2
    assert 0.3 <= second[0] < 0.33 and 0.37 < second[1] <= 0.4
    assert found.idle_s == pytest.approx(first[1] - first[0] + second[1] - second[0])


@given(
    begin=st.floats(0.05, 0.9),
    length=st.floats(0.06, 0.5),
    step_s=st.floats(0.1, 20.0),
    vary=st.floats(0.0, 0.05),
    seed=st.integers(0, 1000),
)
def test_no_gap_reaches_into_a_collective(begin: float, length: float, step_s: float, vary: float, seed: int) -> None:
    end = min(1.0, begin + length)
    found = profile_of(looks_at([(begin, end)], step_s, 2 * SAMPLES, vary=vary, seed=seed))
    slack_s = (vary + 0.5 / PARTS) * step_s  # a part that is busy in its last moments only
    for gap in found.gaps:
        assert gap[1] <= begin * step_s + slack_s or gap[0] >= end * step_s - slack_s
    idle_s = (1 - (end - begin)) * step_s
    assert found.idle_s >= idle_s - (2 * vary + 4 / PARTS) * step_s - 0.01


@given(samples=st.lists(st.builds(NetworkSample, st.integers(-1, 9), *[st.floats(0, 100)] * 2, st.booleans())))
def test_any_samples_make_gaps_in_order_or_a_reason(samples: list[NetworkSample]) -> None:
    found = profile_of(samples)
    assert bool(found.gaps) != bool(found.why)
    edges = [edge for gap in found.gaps for edge in gap]
    assert edges == sorted(edges) and all(0 <= edge <= found.step_s for edge in edges)


def test_collectives_that_come_earlier_in_some_steps_make_the_gap_smaller() -> None:
    early = [
        sample
        for number in range(8)
        for sample in looks_at([(0.3 if number % 4 == 0 else 0.5, 0.75)], count=2 * PARTS, start=10 + 2 * number)
    ]
    rebased = [
        NetworkSample(one.step, one.begun_at + 0.8 * (number // 64), one.at + 0.8 * (number // 64), one.busy)
        for number, one in enumerate(early)
    ]
    gaps = profile_of(rebased).gaps
    assert gaps[0][1] <= 0.3 * 0.4


def test_a_single_odd_step_does_not_count() -> None:
    samples = looks_at([(0.5, 0.75)])
    odd = [NetworkSample(30, 200.0, 200.0 + n * 0.05, True) for n in range(20)]  # a save: 2 s, busy all the time
    after = [NetworkSample(31, 202.0, 202.01, False)]
    assert profile_of([*samples, *odd, *after]) == profile_of(samples)


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        ([], "too few steps"),
        (looks_at([(0.5, 0.75)], count=3 * PARTS), "too few steps"),
        (looks_at([]), "no collectives"),
        (looks_at([(0.0, 1.0)]), "no gaps"),
        (looks_at([(0.5, 0.75)], step_s=0.004), "no gaps"),  # over before a sender has woken up
        (looks_at([(0.5, 0.75)], count=2 * SAMPLES, vary=0.9), "vary"),
    ],
)
def test_what_is_not_known_has_a_reason(samples: list[NetworkSample], why: str) -> None:
    found = profile_of(samples)
    assert found.gaps == () and why in found.why


def test_steps_of_another_length_are_learned_anew() -> None:
    profile = StepNetworkProfile()
    profile.add_samples(looks_at([(0.5, 0.75)], 0.4))
    assert profile.read().step_s == pytest.approx(0.4)
    for at in range(0, SAMPLES, 20):
        profile.add_samples(looks_at([(0.2, 0.3)], 1.0, start=50)[at : at + 20])
    assert profile.read().step_s == pytest.approx(1.0) and profile.count <= SAMPLES
    assert profile.read().gaps[0][1] <= 0.2 and profile.read().gaps[1][1] > 0.9


def test_ranks_of_a_node_share_the_gaps_that_all_have() -> None:
    one, other = profile_of(looks_at([(0.5, 0.75)])), profile_of(looks_at([(0.25, 0.5)]))
    both = shared_gaps([one, other])
    assert all(edge <= 0.1 or edge >= 0.3 for gap in both.gaps for edge in gap) and both.idle_s < one.idle_s
    assert shared_gaps([one, StepGaps(why="steps vary too much")]).why == "steps vary too much"
    assert shared_gaps([one, StepGaps(step_s=0.4, gaps=((0.21, 0.29),))]).why == "ranks have no gap in common"
    assert shared_gaps([]).why
