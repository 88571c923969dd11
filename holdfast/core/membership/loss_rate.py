"""How often nodes are lost, learned from past runs, with its uncertainty; and how many standbys follow from that.

Before any run, the rate is a mixture of two Gamma distributions. A narrow one describes the published rates of large
clusters and has most of the weight. A wide one gains weight if a site's own runs contradict those rates. Runs update
both.
"""

from collections.abc import Callable
from math import exp, lgamma, log, sqrt

import msgspec

# ByteRobust 0.12, Meta RSC-2 0.23, Llama 3 0.38 and RSC-1 0.65 % of nodes a day: their geometric mean and their spread.
_PUBLISHED_A_DAY = 0.0029
_PUBLISHED_SHAPE = 2.0
_PRIOR = ((0.998, _PUBLISHED_SHAPE, _PUBLISHED_SHAPE / (_PUBLISHED_A_DAY / 24)), (0.002, 0.5, 100.0))
_TAIL = 0.05  # of the rate on either side of the interval that is told


class NodeLosses(msgspec.Struct, frozen=True, kw_only=True):
    """Losses in past runs: how many nodes were lost, in how many node-hours."""

    runs: int = 0
    lost: int = 0
    node_h: float = 0.0


class StandbyAdvice(msgspec.Struct, frozen=True, kw_only=True):
    standbys: int
    reason: str


class LossRate(msgspec.Struct, frozen=True):
    """The rate of node losses per node-hour, as a mixture of Gamma distributions. Each part of the mixture has a
    weight, a shape, and a number of node-hours (the inverse scale)."""

    parts: tuple[tuple[float, float, float], ...] = _PRIOR

    def after(self, seen: NodeLosses) -> "LossRate":
        """Return the rate updated by the losses in these runs."""
        hours = seen.node_h
        likely = [
            log(weight) + lgamma(a + seen.lost) - lgamma(a) + a * log(b) - (a + seen.lost) * log(b + hours)
            for weight, a, b in self.parts
        ]
        weights = [exp(one - max(likely)) for one in likely]
        pairs = zip(weights, self.parts, strict=True)
        return LossRate(tuple((w / sum(weights), a + seen.lost, b + hours) for w, (_, a, b) in pairs))

    def quantile(self, share: float) -> float:
        """Return a rate of losses such that the true rate lies below it with the probability `share`."""
        top = max((a + 40 * sqrt(a) + 40) / b for _, a, b in self.parts)
        return _bisect(lambda rate: sum(w * _gamma_below(a, b * rate) for w, a, b in self.parts) - share, top)

    def most_lost(self, nodes: int, hours: float, confidence: float = 0.99) -> int:
        """Return the largest number of nodes, out of `nodes`, that will be lost within `hours`, with this
        confidence."""
        exposed, total = nodes * hours, 0.0
        for count in range(nodes):
            for w, a, b in self.parts:
                ways = lgamma(a + count) - lgamma(a) - lgamma(count + 1)
                total += w * exp(ways + a * log(b / (b + exposed)) + count * log(exposed / (b + exposed)))
            if total >= confidence:
                return count
        return nodes


def advise_standbys(nodes: int, refill_h: float, seen: NodeLosses) -> StandbyAdvice:
    """Return how many standbys to keep, at least one. They cover, in 99 of 100 cases, the nodes lost while one standby
    is replaced. Without a standby, the job would wait for a new node at every loss."""
    rate = LossRate().after(seen)
    standbys = max(1, rate.most_lost(nodes, refill_h))
    low, high = (100 * rate.quantile(share) for share in (_TAIL, 1 - _TAIL))
    if seen.runs:
        hours = f"{seen.node_h:,.0f}" if seen.node_h >= 10 else f"{seen.node_h:.2g}"
        known = f"{_counted(seen.lost, 'node')} lost in {hours} node-hours of "
        known += f"{_counted(seen.runs, 'past run')} ({low:.2g} to {high:.2g} per 100 node-hours, 90 %)"
    else:
        known = (
            f"no past run tells how often nodes are lost, so published rates count ({low:.2g} to {high:.2g} per 100 "
        )
        known += "node-hours, 90 %)"
    within = f"{refill_h * 60:.0f} min" if refill_h < 1 else f"{refill_h:g} h"
    return StandbyAdvice(
        standbys=standbys, reason=f"{_counted(standbys, 'standby')}: {known}, each replaced within {within}"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _gamma_below(shape: float, x: float) -> float:
    """Return the chance that a Gamma variable of this shape and scale 1 is below x."""
    if x <= 0:
        return 0.0
    if x > shape + 40 * sqrt(shape) + 40:
        return 1.0
    term = total = exp(shape * log(x) - x - lgamma(shape + 1))
    number = 1
    while term > 1e-17 * total:
        term *= x / (shape + number)
        total += term
        number += 1
    return total


def _bisect(rises: Callable[[float], float], top: float) -> float:
    """Return where a rising function is zero, between 0 and `top`."""
    low, high = 0.0, top
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < 0 else (low, middle)
    return high
