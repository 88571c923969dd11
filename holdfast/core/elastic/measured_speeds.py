"""How fast each worker is and how long each layer takes, from what workers have measured of their own layers.

A layer's time on a worker is taken for the layer's work, divided by the worker's speed. Workers can be compared if they
hold the same layers, or if workers between them do. The fastest worker among these has speed 1.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

ALIKE = 0.25  # differences up to this part are noise: such workers and such layers count as alike
_ROUNDS = 300  # of the fit, at most; one is exact if all workers in question hold the same layers
_CLOSE = 1e-6  # change of the logarithms of speeds at which the fit ends

LayerSeconds = Mapping[int, float]  # by layer: seconds for one microbatch, forward and backward


class MeasuredSpeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Speeds and layer times as the planner takes them."""

    speeds: tuple[float, ...] = ()  # by worker: relative; () if all are alike
    layer_s: tuple[float, ...] = ()  # by layer: relative, in units of `unit_s`; () if all take the same
    unit_s: float = 0.0  # seconds of a usual layer for one microbatch on a worker of speed 1; 0: nothing was measured


UNMEASURED = MeasuredSpeeds()


def fit_speeds(measured: Sequence[LayerSeconds], layers: int, known: MeasuredSpeeds = UNMEASURED) -> MeasuredSpeeds:
    """Return speeds and layer times. `measured` has for each worker the layers that it timed; a worker that timed none
    has speed 1, and a layer that nobody timed takes as long as the others.

    `known` are the speeds and layer times that counted before, for the same workers. What differs from these by no more
    than noise stays as it was. Workers that nobody can be compared with keep their speed."""
    times = [{layer: s for layer, s in mine.items() if s > 0 and 0 <= layer < layers} for mine in measured]
    if not any(times):
        return known
    before = known.speeds or (1.0,) * len(times)
    speeds = list(before)
    for group in _comparable(times):
        fastest = max(before[worker] for worker in group)
        for worker, speed in _fit_group({worker: times[worker] for worker in group}).items():
            speeds[worker] = _settle(before[worker], speed * fastest)
    works = {layer: statistics.median(found) for layer, found in _works(times, speeds).items()}
    unit_s = statistics.median(works.values())
    each = known.layer_s or (1.0,) * layers
    layer_s = tuple(_settle(each[layer], works.get(layer, unit_s) / unit_s) for layer in range(layers))
    return MeasuredSpeeds(
        speeds=() if min(speeds) == 1 else tuple(round(one, 3) for one in speeds),
        layer_s=() if set(layer_s) == {1.0} else tuple(round(one, 3) for one in layer_s),
        unit_s=unit_s,
    )


def _settle(before: float, now: float) -> float:
    """Return what counts from now on: the value before, or 1, if the new one differs from it by no more than noise."""
    return next((usual for usual in (before, 1.0) if abs(now / usual - 1) <= ALIKE), now)


def _comparable(times: Sequence[LayerSeconds]) -> Iterable[list[int]]:
    """Return the groups of workers that share layers, directly or through others of the group."""
    group_of: dict[int, list[int]] = {}  # by layer
    for worker, mine in enumerate(times):
        joined = [worker] if mine else []
        for other in {id(group_of[layer]): group_of[layer] for layer in mine if layer in group_of}.values():
            joined += other
        members = set(joined)
        for layer in {*mine, *(layer for layer, group in group_of.items() if not members.isdisjoint(group))}:
            group_of[layer] = joined
    return {id(group): group for group in group_of.values()}.values()


def _fit_group(times: Mapping[int, LayerSeconds]) -> dict[int, float]:
    """Return the speed of each worker, beside the fastest. In turns, layers get the work that fits the workers' speeds,
    and workers the speed that fits the layers' works, on average in logarithms."""
    shared = Counter(layer for mine in times.values() for layer in mine)  # a layer of one worker says nothing of speeds
    logs = {worker: {n: math.log(s) for n, s in mine.items() if shared[n] > 1} for worker, mine in times.items()}
    speeds = dict.fromkeys(logs, 0.0)
    for _ in range(_ROUNDS):
        by_layer: dict[int, list[float]] = {}
        for worker, mine in logs.items():
            for layer, log in mine.items():
                by_layer.setdefault(layer, []).append(log + speeds[worker])
        works = {layer: statistics.fmean(found) for layer, found in by_layer.items()}
        before, speeds = speeds, {worker: _mean_gap(works, mine) for worker, mine in logs.items()}
        if max(abs(speeds[worker] - before[worker]) for worker in speeds) < _CLOSE:
            break
    fastest = max(speeds.values())
    return {worker: math.exp(speed - fastest) for worker, speed in speeds.items()}


def _mean_gap(works: Mapping[int, float], logs: Mapping[int, float]) -> float:
    return statistics.fmean([works[layer] - log for layer, log in logs.items()]) if logs else 0.0


def _works(times: Sequence[LayerSeconds], speeds: Sequence[float]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for mine, speed in zip(times, speeds, strict=True):
        for layer, seconds in mine.items():
            found.setdefault(layer, []).append(seconds * speed)
    return found
