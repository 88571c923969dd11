"""Repeats of a replay, and what silence means."""

from math import comb
from random import Random

import pytest

from holdfast.core.replay import detection_odds


@pytest.mark.parametrize(
    ("q", "repeats", "wanted"), [(1.0, 1, 1.0), (0.5, 1, 0.25), (0.1, 5, 0.1677), (0.02, 1, 0.0004), (0.02, 50, 0.404)]
)
def test_success(q: float, repeats: int, wanted: float) -> None:
    assert detection_odds.dual_phase_odds(q, repeats) == pytest.approx(wanted, abs=5e-4)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("q", [1.0, 0.999, 0.5, 0.2, 0.1, 0.02, 1e-4])
def test_repeats_are_enough_and_no_more(q: float, confidence: float) -> None:
    repeats = detection_odds.repeats_needed(q, confidence, most=10**7)
    assert detection_odds.dual_phase_odds(q, repeats) >= confidence - 1e-9
    assert repeats == 1 or detection_odds.dual_phase_odds(q, repeats - 1) < confidence


def test_repeats_are_bounded() -> None:
    assert detection_odds.repeats_needed(0.0, 0.95, most=30) == 30
    assert detection_odds.repeats_needed(1e-6, 0.95, most=30) == 30
    assert detection_odds.repeats_needed(0.5, 0.95, most=3) == 3
    for wrong in ((0.5, 1.0, 3), (0.5, 0.0, 3), (-0.1, 0.9, 3), (1.1, 0.9, 3), (0.5, 0.9, 0)):
        with pytest.raises(ValueError, match="confidence"):
            detection_odds.repeats_needed(*wrong)


def test_what_a_first_showing_says_of_the_second() -> None:
    """The closed form against drawing: q evenly, the first showing in replay s, hidden in r more."""
    rng, confidence = Random(1), 0.95
    hidden: dict[int, list[bool]] = {1: [], 2: []}
    for _ in range(60_000):
        q = rng.random()
        s = next((n for n in (1, 2) if rng.random() < q), None)
        if s:
            r = detection_odds.second_phase_repeats(s, confidence, most=100)
            hidden[s].append(all(rng.random() >= q for _ in range(r)))
    for s, found in hidden.items():
        r = detection_odds.second_phase_repeats(s, confidence, most=100)
        wanted = s * (s + 1) / ((s + r) * (s + r + 1))
        assert wanted <= 1 - confidence**0.5
        low, high = detection_odds.wilson_interval(sum(found), len(found), z=4)
        assert low <= wanted <= high
    assert detection_odds.second_phase_repeats(1, 0.95, most=4) == 4


def test_what_silence_says() -> None:
    assert detection_odds.excluded_rate(0, 0.95) == 1.0
    q = detection_odds.excluded_rate(10, 0.95)
    assert detection_odds.shown_odds(q, 10) == pytest.approx(0.95)
    assert detection_odds.remaining_belief(0) == 0.5
    assert detection_odds.remaining_belief(9) == pytest.approx(1 / 11)
    assert detection_odds.remaining_belief(9, prior=0.9) == pytest.approx(0.09 / 0.19)


def test_per_step() -> None:
    assert detection_odds.step_odds(1.0, 5) == 1.0
    assert detection_odds.shown_odds(detection_odds.step_odds(0.3, 7), 7) == pytest.approx(0.3)


def test_wilson() -> None:
    assert detection_odds.wilson_interval(0, 0) == (0.0, 1.0)
    assert detection_odds.wilson_interval(0, 20)[0] == 0.0 and detection_odds.wilson_interval(20, 20)[1] == 1.0
    low, high = detection_odds.wilson_interval(8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    covered = sum(comb(50, k) * 0.2**k * 0.8 ** (50 - k) for k in range(51) if _holds(k, 50, 0.2))
    assert 0.93 < covered < 0.97


def _holds(successes: int, trials: int, rate: float) -> bool:
    low, high = detection_odds.wilson_interval(successes, trials)
    return low <= rate <= high
