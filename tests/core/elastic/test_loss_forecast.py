"""What past losses say of those to come: rates that were drawn are found again, and who is sure is right as often."""

import math
from random import Random

import msgspec
import pytest

from holdfast.core.elastic.loss_forecast import LossForecast, LossHistory, forecast_losses


def drawn_losses(rng: Random, rate: float, workers: int, seconds: float) -> int:
    """Losses among so many workers, each of which is replaced at once."""
    lost, at = 0, rng.expovariate(max(1e-30, rate * workers))
    while at < seconds:
        lost, at = lost + 1, at + rng.expovariate(max(1e-30, rate * workers))
    return lost


def test_nothing_seen_says_little_and_a_worker_day_says_more() -> None:
    first = forecast_losses(LossHistory())
    later = forecast_losses(LossHistory().add(8, 10 * 86400, 0))
    assert later.rate < first.rate / 10
    assert first.most_losses(80, 864000, 0.99) > later.most_losses(80, 864000, 0.99)


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-4])
def test_the_rate_is_found_again(rate: float) -> None:
    rng = Random(3)
    history = LossHistory()
    for _ in range(50):
        history = history.add(100, 7200, drawn_losses(rng, rate, 100, 7200))
    found = forecast_losses(history)
    deviation = 1 / math.sqrt(found.shape)
    assert found.rate == pytest.approx(rate, rel=4 * deviation)


def test_chances_are_chances_and_their_mean_is_the_rate() -> None:
    for lost, watched_s, workers, seconds in [(0, 0.0, 4, 3600), (3, 1e5, 16, 600), (200, 1e7, 1000, 3600)]:
        forecast = forecast_losses(LossHistory(lost, watched_s))
        chances = forecast.chances(workers, seconds, 2000)
        assert all(0 <= one <= 1 for one in chances) and sum(chances) == pytest.approx(1)
        mean = sum(count * one for count, one in enumerate(chances))
        assert mean == pytest.approx(forecast.rate * workers * seconds, rel=0.01)
        assert forecast.chances(workers, seconds, 2)[0] == chances[0]
        assert forecast.chances(workers, 0, 3) == [1.0, 0.0, 0.0, 0.0]


def test_who_is_90_percent_sure_is_right_as_often() -> None:
    """The rate is drawn from what is assumed before anything is seen."""
    rng, right, tried = Random(11), 0, 600
    for _ in range(tried):
        rate = rng.gammavariate(0.05, 1 / 432000)
        seen = LossHistory().add(20, 3600, drawn_losses(rng, rate, 20, 3600))
        right += drawn_losses(rng, rate, 20, 3600) <= forecast_losses(seen).most_losses(1000, 72)
    assert right / tried >= 0.88


def test_it_is_the_same_for_all_who_have_seen_the_same() -> None:
    history = LossHistory().add(7, 1234.5, 2)
    copy = msgspec.json.decode(msgspec.json.encode(history), type=LossHistory)
    assert forecast_losses(copy) == forecast_losses(history) == LossForecast(2.05, 5 * 86400 + 7 * 1234.5)
