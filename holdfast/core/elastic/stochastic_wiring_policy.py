"""Stochastic wiring: the route of each microbatch is drawn from all live owners of layers, faster ones more often."""

from hashlib import blake2b
from heapq import heapify, heappop, heappush

from holdfast.core.elastic.layer_owners import Held, missing_layers, owners_by_layer
from holdfast.core.elastic.plan_ground import PlanGround, live_proposal, name_orphans
from holdfast.core.elastic.proposal import Infeasible, Proposal
from holdfast.core.elastic.route_times import LayerTimes, Route
from holdfast.model.pipeline_routes import PipelineJob, RoutePlan, RouteSegment

STOCHASTIC = "stochastic wiring"


def propose_stochastic(ground: PlanGround) -> Proposal | Infeasible:
    """Propose routes that are drawn from the job's seed and the step. Each layer goes to the owner that would finish it
    first. A draw decides between equal owners."""
    job, situation = ground.job, ground.situation
    stay = tuple(() if number in situation.leaving else mine for number, mine in enumerate(situation.held))
    if orphans := missing_layers(job, stay):
        return Infeasible(policy=STOCHASTIC, reason=name_orphans(orphans))
    routes = draw_routes(job, stay, ground.times, ground.resume_step)
    plan = RoutePlan(held=situation.held, routes=routes, resume_step=ground.resume_step)
    return live_proposal(STOCHASTIC, ground, plan, reason=f"routes are drawn by seed {job.seed}")


def draw_routes(job: PipelineJob, held: Held, times: LayerTimes, step: int) -> tuple[Route, ...]:
    """Draw a route for each microbatch; the same seed, step and owners give the same routes."""
    wiring = DrawnWiring(job, held, times, step)
    return tuple(wiring.draw_route() for _ in range(job.microbatches))


class DrawnWiring:
    """Keeps for each layer a queue of its owners, ordered by when each owner was then expected to finish the layer."""

    def __init__(self, job: PipelineJob, held: Held, times: LayerTimes, step: int) -> None:
        self._layers = job.layers
        self._times = times
        self._lots = [_draw_lot(job.seed, step, number) for number in range(len(held))]
        self._ends = [_run_ends(mine) for mine in held]
        self._loads = [0.0] * len(held)
        self._queues: list[list[tuple[float, int, int]]] = []
        for owners in owners_by_layer(job.layers, held):
            queue = [(self._work(owner, len(self._queues)), self._lots[owner], owner) for owner in owners]
            heapify(queue)
            self._queues.append(queue)

    def draw_route(self) -> Route:
        found: list[RouteSegment] = []
        layer = 0
        while layer < self._layers:
            owner = self._take_owner(layer)
            end = self._ends[owner][layer]
            found.append(RouteSegment(worker=owner, first=layer, end=end))
            layer = end
        return tuple(found)

    def _take_owner(self, layer: int) -> int:
        queue = self._queues[layer]
        while True:
            done_at, lot, owner = heappop(queue)
            now = self._loads[owner] + self._work(owner, layer)
            if now > done_at:  # it has taken other work since it was queued
                heappush(queue, (now, lot, owner))
                continue
            self._loads[owner] = now
            heappush(queue, (now + self._work(owner, layer), lot, owner))
            return owner

    def _work(self, owner: int, layer: int) -> float:
        """Return how long this owner takes for the unbroken run of its layers that begins at `layer`."""
        return self._times.segment_time(RouteSegment(worker=owner, first=layer, end=self._ends[owner][layer]))


def _run_ends(layers: tuple[int, ...]) -> dict[int, int]:
    """Return for each of a worker's `layers` the end of the unbroken run of layers that contains it."""
    ends: dict[int, int] = {}
    for layer in sorted(layers, reverse=True):
        ends[layer] = ends.get(layer + 1, layer + 1)
    return ends


def _draw_lot(seed: int, step: int, number: int) -> int:
    return int.from_bytes(blake2b(f"{seed} {step} {number}".encode(), digest_size=6).digest(), "big")
