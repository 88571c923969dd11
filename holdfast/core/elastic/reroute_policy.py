"""Rerouting: peers that hold the same layers take a lost worker's microbatches, and nothing is copied."""

from collections.abc import Mapping, Sequence

from holdfast.core.elastic.layer_owners import Held, owners_by_layer
from holdfast.core.elastic.plan_ground import (
    PlanGround,
    broken_routes,
    can_compute,
    join_segments,
    live_proposal,
    refuse_orphans,
    survey,
)
from holdfast.core.elastic.proposal import Infeasible, PhaseCosts, Proposal
from holdfast.core.elastic.route_times import LayerTimes, Route, count_routes, loads_of
from holdfast.model.pipeline_routes import PipelineJob, PipelineSituation, RoutePlan, RouteSegment

REROUTE = "reroute"


def propose_reroute(job: PipelineJob, situation: PipelineSituation, costs: PhaseCosts) -> Proposal | Infeasible:
    """Propose that a lost worker's microbatches go to the least loaded workers that hold the same layers."""
    ground = survey(job, situation, costs)
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
    broken = broken_routes(before, held, away)
    if not broken:
        return tuple(before)
    wiring = PeerWiring(ground.times, ground.job.layers, held, away)
    wiring.loads = loads_of(((r, n) for r, n in count_routes(before) if id(r) not in broken), ground.times)
    for route, count in count_routes(before):
        if id(route) in broken:
            wiring.keep_good(route, count)
    return tuple(wiring.mend_route(route) if id(route) in broken else route for route in before)


class PeerWiring:
    """Mends broken routes (routes with workers that can no longer be used). For each of their layers it chooses a
    worker that holds the layer and has the least load."""

    def __init__(self, times: LayerTimes, layers: int, held: Held, away: Sequence[int]) -> None:
        self._times = times
        self._layers = layers
        self._away = frozenset(away)
        self._sets = [frozenset() if number in self._away else frozenset(mine) for number, mine in enumerate(held)]
        stay = tuple(() if number in self._away else mine for number, mine in enumerate(held))
        self._owners = owners_by_layer(layers, stay)
        self.loads: dict[int, float] = {}

    def keep_good(self, route: Route, count: int) -> None:
        """Add the parts of a broken route that can still be used to the load of their workers."""
        for segment in route:
            if can_compute(segment, self._sets):
                self._add(segment, count)

    def mend_route(self, route: Route) -> Route:
        """Return the route with its unusable segments given to other owners of the same layers. A route that was left
        out, and so is empty, gets an owner for every layer."""
        found: list[RouteSegment] = []
        for segment in route or (RouteSegment(worker=-1, first=0, end=self._layers),):
            if can_compute(segment, self._sets):
                found.append(segment)
            else:
                found += self.wire_layers(segment.first, segment.end)
        return join_segments(found)

    def wire_layers(self, first: int, end: int) -> list[RouteSegment]:
        """Give these layers to as few owners as possible. Among equally good owners, choose the least loaded."""
        found = []
        while first < end:
            runs: Mapping[int, int] = {owner: self._run_end(owner, first, end) for owner in self._owners[first]}
            owner = min(runs, key=lambda one: (-runs[one], self._load_with(one, first, runs[one]), one))
            found.append(RouteSegment(worker=owner, first=first, end=runs[owner]))
            self._add(found[-1], 1)
            first = runs[owner]
        return found

    def _run_end(self, owner: int, first: int, end: int) -> int:
        mine = self._sets[owner]
        return next((layer for layer in range(first, end) if layer not in mine), end)

    def _load_with(self, owner: int, first: int, end: int) -> float:
        return self.loads.get(owner, 0.0) + self._times.segment_time(RouteSegment(worker=owner, first=first, end=end))

    def _add(self, segment: RouteSegment, count: int) -> None:
        more = count * self._times.segment_time(segment)
        self.loads[segment.worker] = self.loads.get(segment.worker, 0.0) + more
