"""Forecasts how many workers are lost in a time to come, from how many were lost until now, and says how sure that is.

Losses are taken to strike workers independently, at a rate that nobody knows. What is known of the rate is a gamma
distribution: it begins as if a twentieth of a loss had been seen in five days of one worker, and what is seen outweighs
that soon. So the number of losses to come is a negative binomial one, which is wider the less has been seen.
"""

import math

import msgspec

_PRIOR_LOSSES, _PRIOR_S = 0.05, 5 * 86400.0


class LossHistory(msgspec.Struct, frozen=True):
    """What a job has seen of losses."""

    lost: int = 0  # workers that were lost, and whose end was not known before
    watched_s: float = 0.0  # for how long workers were watched, added up over workers

    def add(self, workers: int, seconds: float, lost: int) -> "LossHistory":
        """Return the history with one more stretch of time, in which so many of these workers were lost."""
        return LossHistory(self.lost + lost, self.watched_s + workers * max(0.0, seconds))


class LossForecast(msgspec.Struct, frozen=True):
    """What is known of the rate at which workers are lost."""

    shape: float = _PRIOR_LOSSES
    exposure_s: float = _PRIOR_S

    @property
    def rate(self) -> float:
        """Return the losses of one worker to expect per second."""
        return self.shape / self.exposure_s

    def chances(self, workers: int, seconds: float, most: int) -> list[float]:
        """Return the chances of 0, 1 and so on losses among workers in a time. The last one, of `most` losses, is that
        of as many or more."""
        odds = workers * max(0.0, seconds) / self.exposure_s
        none = -math.log1p(odds)
        ratio = odds / (1 + odds)
        found: list[float] = []
        one = math.exp(self.shape * none)
        for count in range(most):
            found.append(one)
            one *= (self.shape + count) / (count + 1) * ratio
        return [*found, max(0.0, 1 - sum(found))]

    def most_losses(self, workers: int, seconds: float, sure: float = 0.9) -> int:
        """Return how many losses there are at most, by this chance of being right."""
        odds = workers * max(0.0, seconds) / self.exposure_s
        one, ratio = math.exp(-self.shape * math.log1p(odds)), odds / (1 + odds)
        known, count = one, 0
        while known < sure and count < workers:
            one *= (self.shape + count) / (count + 1) * ratio
            count += 1
            known += one
        return count


def forecast_losses(history: LossHistory) -> LossForecast:
    """Return what a job's history says about the rate of losses."""
    return LossForecast(_PRIOR_LOSSES + history.lost, _PRIOR_S + history.watched_s)
