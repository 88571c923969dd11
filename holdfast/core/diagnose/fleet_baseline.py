"""Compares a node's measurements with the fleet and with the node's own past; no number is good or bad by itself.

Whole distributions are compared. A distribution falls short of another by the area between their empirical distribution
functions, on the worse side only. The area uses logarithms, so the shortfall is relative in any unit: 0.04 means "4 %
worse".

One node stands for the fleet: the medoid, which is the node closest to all other nodes. At first it is the medoid of a
majority whose nodes are close together. Then it is the medoid of all nodes that do not fall short of it. This repeats
until the nodes stay the same. The scatter of the healthy nodes decides how large a shortfall is allowed.
"""

from collections.abc import Mapping, Sequence
from math import exp, log
from statistics import median

import msgspec

LEAST = 3  # nodes, or measurements of the past; fewer tell nothing about the others
KEPT = 32  # measurements of a node's past
_SIGMAS = 5.0  # beyond what healthy nodes do
_MATTERS = 0.015  # a smaller shortfall is worth nobody's eviction, however certain
_SCALE = 1.4826  # of a median deviation, to be a standard deviation where values are normal
_FEW = 8.0  # nodes, or measurements; about as many are needed to know a scatter
_POINTS = 21  # at which two distributions are compared
_TRIM = 0.15
_LOWER, _MIDDLE, _UPPER, _QUARTILES = 4, 10, 16, 1.11  # of these points; the outer ones stand 1.11 sigmas apart
_ROUNDS = 16


class MeasurementHistory(msgspec.Struct, frozen=True):
    """The earlier measurements of a node: for each kind the newest medians, oldest first."""

    medians: dict[str, tuple[float, ...]] = {}

    def with_value(self, kind: str, value: float) -> "MeasurementHistory":
        kept = (*self.medians.get(kind, ()), value)[-KEPT:]
        return MeasurementHistory({**self.medians, kind: kept})


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """How far a node falls short of the fleet or of its own past."""

    by: float  # as a part of what it should be
    limit: float
    of: str  # "the fleet", "its own past"


def shortfall(samples: Sequence[float], against: Sequence[float], *, lower: bool = False) -> float:
    """Return by what share the samples fall short of `against`, as the area between the two distributions. Only parts
    where the samples are worse count. `lower` says that lower values are better."""
    return _area_share(_one_sided_area(_log_quantiles(samples), _log_quantiles(against), lower), lower)


def below_fleet(
    measured: Mapping[str, Sequence[float]], *, lower: bool = False, matters: float = 0.0
) -> dict[str, Shortfall]:
    """Return the nodes whose measurements fall short of the fleet's by `matters` or more (0: a default). `lower` says
    that lower values are better. Fewer than three nodes are not compared."""
    curves = {node: _log_quantiles(samples) for node, samples in measured.items() if samples}
    healthy = _closest_majority(curves)
    matters = matters or _MATTERS * max(1.0, _FEW / max(1, len(curves)))
    for _ in range(_ROUNDS if len(curves) >= LEAST else 0):
        if 2 * len(healthy) <= len(curves):
            return {}
        medoid = curves[_find_medoid(curves, healthy)]
        limit = _scatter_limit(
            [_signed_area(curves[node], medoid, lower) for node in healthy], [curves[node] for node in healthy]
        )
        limit = max(limit, matters)
        short = {node: _one_sided_area(curve, medoid, lower) for node, curve in curves.items()}
        kept = [node for node in sorted(curves) if short[node] <= limit]
        if kept == healthy:
            return {n: _make_shortfall(by, limit, lower, "the fleet") for n, by in short.items() if by > limit}
        healthy = kept
    return {}


def below_own_past(
    now: Mapping[str, float], past: Mapping[str, Sequence[float]], *, lower: bool = False
) -> dict[str, Shortfall]:
    """Return the nodes that became worse than they were, by more than the median node did. The median change is no
    node's fault: for example, a new driver may have slowed all nodes."""
    known = {node: _log_quantiles(past[node], 0.0) for node in now if len(past.get(node, ())) >= LEAST}
    change = {node: _safe_log(now[node]) - known[node][_MIDDLE] for node in known}
    of_all = median(change.values()) if len(change) >= LEAST else 0.0
    found = {}
    for node in known:
        limit = max(_MATTERS, _scatter_limit([_safe_log(value) for value in past[node]]))
        worse = (change[node] - of_all) * (1.0 if lower else -1.0)
        if worse > limit:
            found[node] = _make_shortfall(worse, limit, lower, "its own past")
    return found


def inner_range(samples: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and highest value of the samples, without the most extreme samples at both ends."""
    curve = _log_quantiles(samples)
    return exp(curve[0]), exp(curve[-1])


def _make_shortfall(by: float, limit: float, lower: bool, of: str) -> Shortfall:
    return Shortfall(by=_area_share(by, lower), limit=_area_share(limit, lower), of=of)


def _area_share(area: float, lower: bool) -> float:
    """Convert an area between logarithmic curves into a relative shortfall. The shortfall says how much too high the
    values are if lower values are better, and how much too low they are otherwise."""
    return exp(area) - 1.0 if lower else 1.0 - exp(-area)


def _safe_log(value: float) -> float:
    return log(max(value, 1e-300))


def _scatter_limit(deviations: Sequence[float], curves: Sequence[Sequence[float]] = ()) -> float:
    """Return how far a healthy node may fall short, given the scatter of healthy nodes. The scatter between few nodes
    is uncertain. So few nodes get a wider limit, and the scatter within each node raises it as well."""
    few = _FEW / len(deviations)
    middle = median(deviations)
    between = _SCALE * median(abs(one - middle) for one in deviations)
    within = median([(c[_UPPER] - c[_LOWER]) / _QUARTILES for c in curves] or [0.0])
    return max(_SIGMAS * between * (1 + few / 2), _SIGMAS * within * min(1.0, few))


def _closest_majority(curves: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the majority of nodes closest to the medoid. Among all nodes, bad nodes could hide each other."""
    if not curves:
        return []
    medoid = curves[_find_medoid(curves, sorted(curves))]
    return sorted(
        sorted(curves, key=lambda node: (_curve_distance(curves[node], medoid), node))[: len(curves) // 2 + 1]
    )


def _find_medoid(curves: Mapping[str, Sequence[float]], among: Sequence[str]) -> str:
    """Return the node with the least sum of distances to all others. Only nodes with a middling median are tried,
    because the distance between two nodes is about the distance between their medians."""
    ordered = sorted(among, key=lambda node: curves[node][_MIDDLE])
    half = len(ordered) // 2
    near = ordered[max(0, half - 2) : half + 3]
    return min(near, key=lambda node: sum(_curve_distance(curves[node], curves[other]) for other in among))


def _curve_distance(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


def _one_sided_area(curve: Sequence[float], against: Sequence[float], lower: bool) -> float:
    sign = -1.0 if lower else 1.0
    return sum(max(0.0, sign * (b - a)) for a, b in zip(curve, against, strict=True)) / _POINTS


def _signed_area(curve: Sequence[float], against: Sequence[float], lower: bool) -> float:
    """Return the area on the worse side minus that on the better side. Healthy nodes scatter evenly around 0."""
    return _one_sided_area(curve, against, lower) - _one_sided_area(curve, against, not lower)


def _log_quantiles(samples: Sequence[float], trim: float = _TRIM) -> list[float]:
    """Return quantiles of the logarithms of the samples. Leave out the highest and lowest share, `trim` at each end,
    because rare hiccups are not the node's fault."""
    ordered = sorted(map(_safe_log, samples))
    last = len(ordered) - 1
    found = []
    for point in range(_POINTS):
        at = last * (trim + (1 - 2 * trim) * point / (_POINTS - 1))
        low = int(at)
        high = min(low + 1, last)
        found.append(ordered[low] + (ordered[high] - ordered[low]) * (at - low))
    return found
