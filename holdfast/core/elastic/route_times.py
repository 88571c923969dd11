"""How long a step takes on a plan's routes: the load of the busiest worker, plus the time to fill and drain
pipelines."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from holdfast.core.elastic.proposal import PhaseCosts
from holdfast.model.pipeline_routes import PipelineJob, RouteSegment

Route = tuple[RouteSegment, ...]


class LayerTimes(msgspec.Struct, frozen=True):
    """Relative times of layers as cumulative sums, and the speeds of workers."""

    until: tuple[float, ...]
    speeds: tuple[float, ...]

    def segment_time(self, segment: RouteSegment) -> float:
        work = self.until[segment.end] - self.until[segment.first]
        return work / self.speeds[segment.worker] if self.speeds and segment.worker >= 0 else work

    def route_time(self, route: Route) -> float:
        return sum(map(self.segment_time, route))


def layer_times(job: PipelineJob, costs: PhaseCosts, speeds: Sequence[float] = ()) -> LayerTimes:
    each = costs.layer_s or (1.0,) * job.layers
    return LayerTimes(until=(0.0, *accumulate(each)), speeds=tuple(speeds))


def count_routes(routes: Iterable[Route]) -> list[tuple[Route, int]]:
    """Return the different routes with the number of microbatches that take each, in order of first appearance.

    Routes are compared by identity, which is fast; `share_routes` makes equal routes the same object.
    """
    counts: dict[int, int] = {}
    found: dict[int, Route] = {}
    for route in routes:
        key = id(route)
        if key not in found:
            found[key], counts[key] = route, 0
        counts[key] += 1
    return [(route, counts[key]) for key, route in found.items()]


def share_routes(routes: Sequence[Route]) -> tuple[Route, ...]:
    """Return the routes with equal routes made one object. A decoder makes a separate object of each route."""
    equal: dict[Route, Route] = {}
    shared = {id(route): equal.setdefault(route, route) for route, _ in count_routes(routes)}
    return tuple(shared[id(route)] for route in routes)


def add_loads(loads: dict[int, float], route: Route, times: LayerTimes, count: int = 1) -> None:
    for segment in route:
        loads[segment.worker] = loads.get(segment.worker, 0.0) + count * times.segment_time(segment)


def loads_of(counted: Iterable[tuple[Route, int]], times: LayerTimes) -> dict[int, float]:
    loads: dict[int, float] = {}
    for route, count in counted:
        add_loads(loads, route, times, count)
    return loads


def step_time(routes: Sequence[Route], times: LayerTimes, kappa: float = 1.0) -> float:
    """Return the time of a step, with the time of one layer for one microbatch as the unit. `kappa` is the share of a
    pipeline's filling and draining that other microbatches cannot use."""
    counted = [(route, count) for route, count in count_routes(routes) if route]
    loads = loads_of(counted, times)
    longest = 0.0
    for route, _ in counted:
        parts = [times.segment_time(segment) for segment in route]
        busiest = max(loads[segment.worker] for segment in route)
        longest = max(longest, busiest + kappa * (sum(parts) - max(parts)))
    return longest


def same_partition(one: Sequence[Route], other: Sequence[Route]) -> bool:
    """Return whether both plans sum gradients in the same groups. For every layer, each worker of the one plan then
    computes the microbatches of one worker of the other plan."""
    if len(one) != len(other):
        return False
    named: dict[tuple[int, int], int] = {}  # layer and worker of the one -> worker of the other
    back: dict[tuple[int, int], int] = {}
    pairs = {(id(a), id(b)): (a, b) for a, b in zip(one, other, strict=True)}
    for mine, theirs in pairs.values():
        if _reach(mine) != _reach(theirs):
            return False
        for layer, (a, b) in enumerate(zip(_owners(mine), _owners(theirs), strict=True)):
            if named.setdefault((layer, a), b) != b or back.setdefault((layer, b), a) != a:
                return False
    return True


def _reach(route: Route) -> int:
    return route[-1].end if route else 0


def _owners(route: Route) -> list[int]:
    return [segment.worker for segment in route for _ in range(segment.first, segment.end)]
