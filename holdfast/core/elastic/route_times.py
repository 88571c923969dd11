"""How long the passes of a step take on a plan's routes: the load of the busiest worker, plus the time to fill and
drain pipelines."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from holdfast.core.elastic.proposal import PhaseCosts
from holdfast.model.pipeline_routes import PipelineJob, RouteSegment

Route = tuple[RouteSegment, ...]


class LayerTimes:
    """Relative times of layers as cumulative sums, and the speeds of workers. Remembers the times of each route, which
    is seen again and again."""

    def __init__(self, until: tuple[float, ...], speeds: tuple[float, ...] = (), send: float = 0.0) -> None:
        self.until, self.speeds, self.send = until, speeds, send
        self._parts: dict[int, tuple[Route, list[float]]] = {}  # by `id()` of a route, which is kept for that

    def segment_time(self, segment: RouteSegment) -> float:
        work = self.until[segment.end] - self.until[segment.first]
        if self.send and segment.end - segment.first < len(self.until) - 1:
            work += self.send
        return work / self.speeds[segment.worker] if self.speeds and segment.worker >= 0 else work

    def parts(self, route: Route) -> list[float]:
        """Return the time of each segment of a route."""
        known = self._parts.get(id(route))
        if known is None:
            known = self._parts[id(route)] = (route, [self.segment_time(segment) for segment in route])
        return known[1]


def layer_times(job: PipelineJob, costs: PhaseCosts, speeds: Sequence[float] = ()) -> LayerTimes:
    each = costs.layer_s or (1.0,) * job.layers
    return LayerTimes(until=(0.0, *accumulate(each)), speeds=tuple(speeds), send=costs.send_s)


def count_routes(routes: Sequence[Route]) -> list[tuple[Route, int]]:
    """Return the different routes with the number of microbatches that take each, in order of first appearance.

    Routes are compared by identity, which is fast; `share_routes` makes equal routes the same object.
    """
    counts = Counter(map(id, routes))
    return [(route, counts[key]) for key, route in _by_id(routes).items()]


def _by_id(routes: Sequence[Route]) -> dict[int, Route]:
    """Return the different routes by their `id()`, in order of first appearance."""
    return dict(zip(map(id, routes), routes, strict=True))


def exchange_routes(routes: Sequence[Route], found: Mapping[int, Route]) -> tuple[Route, ...]:
    """Return for each microbatch the route that `found` has for the `id()` of its route."""
    return tuple(map(found.__getitem__, map(id, routes)))


def share_routes(routes: Sequence[Route]) -> tuple[Route, ...]:
    """Return the routes with equal routes made one object. A decoder makes a separate object of each route."""
    equal: dict[Route, Route] = {}
    return exchange_routes(routes, {key: equal.setdefault(route, route) for key, route in _by_id(routes).items()})


def add_loads(loads: dict[int, float], route: Route, times: LayerTimes, count: int = 1) -> None:
    for segment, part in zip(route, times.parts(route), strict=True):
        loads[segment.worker] = loads.get(segment.worker, 0.0) + count * part


def loads_of(counted: Iterable[tuple[Route, int]], times: LayerTimes) -> dict[int, float]:
    loads: dict[int, float] = {}
    for route, count in counted:
        add_loads(loads, route, times, count)
    return loads


def step_time(counted: Sequence[tuple[Route, int]], times: LayerTimes, kappa: float = 1.0) -> float:
    """Return the time of the passes with so many microbatches on each route. The unit is the time of one layer for one
    microbatch. `kappa` is the share of a pipeline's filling and draining that other microbatches cannot use."""
    loads = loads_of(counted, times)
    longest = 0.0
    for route, _ in counted:
        parts = times.parts(route)
        busiest = max([loads[segment.worker] for segment in route])
        longest = max(longest, busiest + kappa * (sum(parts) - max(parts)))
    return longest


def same_partition(one: Sequence[Route], other: Sequence[Route]) -> bool:
    """Return whether both plans sum gradients in the same groups. For every layer, each worker of the one plan then
    computes the microbatches of one worker of the other plan."""
    if len(one) != len(other):
        return False
    mine, theirs = _by_id(one), _by_id(other)
    pairs = [(mine[a], theirs[b]) for a, b in dict.fromkeys(zip(map(id, one), map(id, other), strict=True))]
    changed = [(a, b) for a, b in pairs if a is not b]
    if any(_reach(a) != _reach(b) for a, b in changed):
        return False
    moved = {segment.worker for pair in changed for route in pair for segment in route}
    near = [(a, b) for a, b in pairs if a is b and not moved.isdisjoint([segment.worker for segment in a])]
    return _map_one_to_one([*changed, *near])  # the others go through workers of their own, each as before


def _map_one_to_one(pairs: Sequence[tuple[Route, Route]]) -> bool:
    """Return whether for every layer each worker of the first routes has one worker of the second routes, and the other
    way round. Layers at which no segment begins are as the layer before them."""
    starts = sorted({segment.first for pair in pairs for route in pair for segment in route})
    named: dict[tuple[int, int], int] = {}  # layer and worker of the one -> worker of the other
    back: dict[tuple[int, int], int] = {}
    for mine, theirs in pairs:
        for layer, a, b in zip(starts, _owners_at(mine, starts), _owners_at(theirs, starts), strict=False):
            if named.setdefault((layer, a), b) != b or back.setdefault((layer, b), a) != a:
                return False
    return True


def _reach(route: Route) -> int:
    return route[-1].end if route else 0


def _owners_at(route: Route, starts: Sequence[int]) -> list[int]:
    """Return the worker of a route at each of these layers."""
    return [
        segment.worker
        for segment in route
        for _ in range(bisect_left(starts, segment.first), bisect_left(starts, segment.end))
    ]
