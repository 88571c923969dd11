"""The best interval between checkpoints, by their cost and the work that they save (Young 1974, Daly 2006)."""

from math import sqrt

import msgspec


class CheckpointInterval(msgspec.Struct, frozen=True, kw_only=True):
    every_s: float
    reason: str


def best_interval(
    cost_s: float, failures_per_day: float, floor_s: float = 60.0, ceiling_s: float = 3600.0
) -> CheckpointInterval:
    """Return the checkpoint interval that loses the least time: sqrt(2 * cost * mean time between failures).

    The cost is the training time that one checkpoint takes, not the time to write it in the background. With state in
    memory and on peers, only failures that lose both need a checkpoint.
    """
    if failures_per_day <= 0:
        return CheckpointInterval(every_s=ceiling_s, reason=f"no failures known: every {ceiling_s:g} s")
    between_s = 86400.0 / failures_per_day
    best_s = sqrt(2 * max(cost_s, 1e-3) * between_s)
    every_s = min(max(best_s, floor_s, cost_s), ceiling_s)
    return CheckpointInterval(
        every_s=every_s, reason=f"cost {cost_s:.2g} s, a failure every {between_s / 3600:.3g} h: every {every_s:.0f} s"
    )
