"""Probabilities in replays: how often to repeat a replay, and how likely a fault still is if no replay showed it."""

from math import ceil, inf, log, sqrt

DIGITS = 1e-9  # a chance that misses the wanted one by less is it


def dual_phase_odds(q: float, repeats: int) -> float:
    """Return the chance that a fault shows in both phases. A phase has `repeats` replays; q is the chance in one of
    them."""
    return shown_odds(q, repeats) ** 2


def shown_odds(q: float, repeats: float) -> float:
    """Return the chance that a fault shows at least once in this many repeats."""
    return 1.0 - float((1.0 - q) ** repeats)


def repeats_needed(q: float, confidence: float, most: int) -> int:
    """Return how often to repeat each phase, `most` times at most, so that both show the fault with this confidence."""
    if not 0.0 < confidence < 1.0 or not 0.0 <= q <= 1.0 or most < 1:
        raise ValueError("a confidence lies between 0 and 1, a chance from 0 to 1, and there is one replay at least")
    if q == 1.0:
        return 1
    wanted = inf if q == 0.0 else log(1.0 - sqrt(confidence)) / log(1.0 - q)
    return most if wanted >= most else max(1, ceil(wanted - DIGITS))


def second_phase_repeats(shown_at: int, confidence: float, most: int) -> int:
    """Return how often to repeat phase two, `most` times at most. The fault first showed in replay `shown_at` of phase
    one.

    The chance q that the fault shows in one replay is unknown. With every q equally likely beforehand, q now follows
    Beta(2, s) with s = `shown_at`. The chance that the fault stays hidden in r more replays is then s(s+1) /
    ((s+r)(s+r+1)). With the returned number of repeats, both phases together reach the confidence.
    """
    hidden = 1.0 - sqrt(confidence)
    s = shown_at
    for r in range(1, most):
        if s * (s + 1) <= hidden * (s + r) * (s + r + 1):
            return r
    return most


def excluded_rate(replays: int, confidence: float) -> float:
    """Return the highest chance per replay that a fault can have if no replay showed it, with this confidence."""
    return shown_odds(confidence, 1.0 / replays) if replays else 1.0


def remaining_belief(replays: int, prior: float = 0.5) -> float:
    """Return the chance that a machine is faulty although no replay showed a fault. `prior` is the chance before the
    replays. All chances of a fault to show in one replay count as equally likely."""
    hidden = prior / (replays + 1)
    return hidden / (hidden + 1.0 - prior)


def step_odds(q: float, steps: int) -> float:
    """Return the chance that a fault shows in a single step, if it shows with chance q in `steps` steps."""
    return shown_odds(q, 1.0 / steps)


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's confidence interval of a measured rate; 95 % unless `z` says otherwise."""
    if trials < 1:
        return 0.0, 1.0
    rate, weight = successes / trials, z * z / trials
    middle = rate + weight / 2
    half = z * sqrt(rate * (1 - rate) / trials + weight / (4 * trials))
    low, high = (middle - half) / (1 + weight), (middle + half) / (1 + weight)
    return (0.0 if successes == 0 else low), (1.0 if successes == trials else high)
