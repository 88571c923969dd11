"""Rerouting: peers that hold the same layers take a lost worker's microbatches, and nothing is copied."""

from collections.abc import Sequence
from heapq import heapify, heapreplace

from holdfast.core.elastic.layer_owners import Held, HeldRuns
from holdfast.core.elastic.plan_ground import (
    PlanGround,
    broken_routes,
    join_segments,
    live_proposal,
    refuse_orphans,
)
from holdfast.core.elastic.proposal import Infeasible, Proposal
from holdfast.core.elastic.route_times import LayerTimes, Route, loads_of
from holdfast.model.pipeline_routes import PipelineJob, PipelineSituation, RoutePlan, RouteSegment

REROUTE = "reroute"


def propose_reroute(ground: PlanGround) -> Proposal | Infeasible:
    """Propose that a lost worker's microbatches go to the least loaded workers that hold the same layers."""
    job, situation, costs = ground.job, ground.situation, ground.costs
    if refused := refuse_orphans(REROUTE, ground):
        return refused
    routes = reroute_all(ground, situation.held)
    plan = RoutePlan(held=situation.held, routes=routes, resume_step=ground.resume_step)
    worst = max(losses_by_layer(job, situation), default=0)
    reason = f"peers take the microbatches of at most {worst} lost owners of a layer"
    return live_proposal(REROUTE, ground, plan, reason=reason, kappa=costs.kappa)


def losses_by_layer(job: PipelineJob, situation: PipelineSituation) -> list[int]:
    """Return for each layer how many lost workers held it. Rerouting depends only on these numbers."""
    counts = [0] * job.layers
    for mine in situation.lost:
        for layer in mine:
            counts[layer] += 1
    return counts


def reroute_all(ground: PlanGround, held: Held, away: Sequence[int] = ()) -> tuple[Route, ...]:
    """Return a route for each microbatch through workers that hold the layers. Old routes that still work are kept.

    `held` are the layers of each worker. `away` are workers that must get no work, so other workers must own every
    layer.
    """
    before = ground.before.routes
    wiring = PeerWiring(ground.times, ground.job.layers, HeldRuns(held, away))
    broken = broken_routes(ground.counted, wiring.runs)
    if not broken:
        return tuple(before)
    wiring.loads = loads_of([(r, n) for r, n in ground.counted if id(r) not in broken], ground.times)
    for route, count in ground.counted:
        if id(route) in broken:
            wiring.keep_good(route, count)
    return tuple(wiring.mend_route(route) if id(route) in broken else route for route in before)


class PeerWiring:
    """Mends broken routes (routes with workers that can no longer be used). For each of their layers it chooses a
    worker that holds the layer and has the least load."""

    def __init__(self, times: LayerTimes, layers: int, runs: HeldRuns) -> None:
        self._times = times
        self._layers = layers
        self.runs = runs
        self.loads: dict[int, float] = {}
        self._queues: dict[tuple[int, int], list[tuple[int, float, int]]] = {}

    def keep_good(self, route: Route, count: int) -> None:
        """Add the parts of a broken route that can still be used to the load of their workers."""
        for segment in route:
            if self.runs.can_compute(segment):
                self._add(segment, count)

    def mend_route(self, route: Route) -> Route:
        """Return the route with its unusable segments given to other owners of the same layers. A route that was left
        out, and so is empty, gets an owner for every layer."""
        found: list[RouteSegment] = []
        for segment in route or (RouteSegment(worker=-1, first=0, end=self._layers),):
            if self.runs.can_compute(segment):
                found.append(segment)
            else:
                found += self.wire_layers(segment.first, segment.end)
        return join_segments(found)

    def wire_layers(self, first: int, end: int) -> list[RouteSegment]:
        """Give these layers to as few owners as possible. Among equally good owners, choose the least loaded."""
        found = []
        while first < end:
            found.append(self._choose_owner(first, end))
            self._add(found[-1], 1)
            first = found[-1].end
        return found

    def _choose_owner(self, first: int, end: int) -> RouteSegment:
        """Return the run of layers from `first` on, with its best owner. Owners stand in a queue with their loads of
        when they were looked at last; loads only grow."""
        queue = self._queues.get((first, end))
        if queue is None:
            queue = self._queues[first, end] = self._line_up(first, end)
        while True:
            shorter, load, owner = queue[0]
            segment = RouteSegment(worker=owner, first=first, end=-shorter)
            now = self._load_with(segment)
            if now == load:
                return segment
            heapreplace(queue, (shorter, now, owner))

    def _line_up(self, first: int, end: int) -> list[tuple[int, float, int]]:
        """Return all owners of layer `first`: the longest runs come first, then the least loads."""
        queue = []
        for owner, mine in enumerate(self.runs.held):
            if first in mine and owner not in self.runs.away:
                segment = RouteSegment(worker=owner, first=first, end=self.runs.run_end(owner, first, end))
                queue.append((-segment.end, self._load_with(segment), owner))
        heapify(queue)
        return queue

    def _load_with(self, segment: RouteSegment) -> float:
        return self.loads.get(segment.worker, 0.0) + self._times.segment_time(segment)

    def _add(self, segment: RouteSegment, count: int) -> None:
        more = count * self._times.segment_time(segment)
        self.loads[segment.worker] = self.loads.get(segment.worker, 0.0) + more
