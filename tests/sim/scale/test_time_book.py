"""The book: pieces tile the clock, what is lost is counted once, and windows are what they say."""

import pytest

from holdfast.sim.scale import failure_mixes, policy_study
from holdfast.sim.scale.failure_schedule import ScaleSetup
from holdfast.sim.scale.time_book import TRAIN, TimeBook


def book() -> TimeBook:
    made = TimeBook()
    made.add_piece(TRAIN, 3600.0)
    made.add_piece("detect", 3660.0, "hang")
    made.add_piece("launch", 3780.0, "hang")
    made.add_piece(TRAIN, 7200.0)
    return made


def test_what_is_lost_by_use_and_cause() -> None:
    made = book()
    made.add_slow_stretch(100.0, 100.0, 0.2, "hot")
    assert made.by_use(0.0) == {"launch": 120.0, "detect": 60.0, "slow": 20.0}
    assert made.by_cause(0.0) == {"hang": 180.0, "hot": 20.0}
    assert made.productive_s(0.0) == 7200 - 180 - 20
    lost = sum(made.by_use(0.01).values())
    assert lost + made.productive_s(0.01) == pytest.approx(made.wall_s)


def test_hours() -> None:
    instants, total, sliding = book().ettr_curves(0.0)
    assert instants == [3600.0, 7200.0]
    assert total == [1.0, pytest.approx(1 - 180 / 7200)]
    assert sliding == [1.0, pytest.approx(1 - 180 / 3600)]
    assert min(book().ettr_curves(0.0, 600.0)[2]) == pytest.approx(1 - 180 / 3600)


def test_slow_steps_and_saving_are_in_the_curves() -> None:
    made = book()
    made.add_slow_stretch(1800.0, 3600.0, 0.25, "hot")
    _, total, sliding = made.ettr_curves(0.01)
    assert total == [pytest.approx(0.99 * (1 - 450 / 3600)), pytest.approx(0.99 * (1 - (900 + 180) / 7200))]
    assert sliding == [pytest.approx(0.99 * (1 - 450 / 3600)), pytest.approx(0.99 * (1 - (450 + 180) / 3600))]


@pytest.mark.parametrize("policy", [*policy_study.POLICIES, "survivors", "elastic"])
@pytest.mark.parametrize("days", [0.01, 1 / 7, pytest.param(12.0, marks=pytest.mark.slow)])
def test_the_curve_ends_at_what_is_reported(policy: str, days: float) -> None:
    setup = ScaleSetup(gpus=9600, days=days, rate=0.01)
    found, made = policy_study.play_policy(policy, setup, failure_mixes.load_mix("byterobust"))
    instants, total, sliding = made.ettr_curves(found.saving)
    assert total[-1] == pytest.approx(found.ettr, abs=1e-9)
    assert instants[-1] == pytest.approx(days * 86400) and all(0 <= part <= 1 for part in sliding)
    assert days < 1 or (found.lost_by_use["slow"] > 0 and found.saving > 0), "both are in it"


def test_of_slow_steps_only_those_before_the_end_count() -> None:
    made = book()
    made.add_slow_stretch(7000.0, 3600.0, 0.2, "hot")
    made.cut_at(7200.0)
    assert made.by_cause(0.0)["hot"] == pytest.approx(0.2 * 200)


def test_nothing_after_the_end_counts() -> None:
    made = book()
    made.add_slow_stretch(7000.0, 25.0, 0.2, "late")
    made.cut_at(3700.0)
    assert made.wall_s == 3700.0
    assert made.by_use(0.0) == {"detect": 60.0, "launch": 40.0}


def test_no_piece_goes_back_in_time() -> None:
    made = book()
    made.add_piece("wait", 7000.0)
    assert made.at == 7200.0
