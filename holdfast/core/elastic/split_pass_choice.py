"""Whether workers make backward passes in two halves under a plan: as the user says, or if that makes steps shorter.

With halves, a worker sends the gradient of its input sooner, and fills idle time with the gradients of its weights.
Each layer takes a little longer for each microbatch, and graphs are kept longer. So a job takes halves by itself only
while workers do the work of lost ones, and only if passes were timed.
"""

from collections.abc import Sequence

import msgspec

from holdfast.core.elastic.proposal import PhaseCosts
from holdfast.core.elastic.route_times import LayerTimes, Route, count_routes
from holdfast.core.elastic.task_order import PassLengths, time_tasks
from holdfast.model.pipeline_routes import PipelineJob, RoutePlan

_LEAST_GAIN = 0.03  # of the time of a step's passes
_LARGEST = 4000  # passes in one direction; those of larger plans are not looked at one by one


def set_halves(job: PipelineJob, costs: PhaseCosts, times: LayerTimes, before: RoutePlan, plan: RoutePlan) -> RoutePlan:
    """Return the plan, and what follows from it, with the choice in it. `before` is the plan before it."""
    halves = job.halves == "on"
    if job.halves == "auto" and may_gain(job, costs, before, plan):
        whole_s, halves_s = (passes_span(costs, times, plan, halves=split) for split in (False, True))
        halves = 0 < halves_s < (1 - _LEAST_GAIN) * whole_s
    then = plan.then and set_halves(job, costs, times, before, plan.then)
    if (halves, then) == (plan.halves, plan.then):
        return plan
    return msgspec.structs.replace(plan, halves=halves, then=then)


def may_gain(job: PipelineJob, costs: PhaseCosts, before: RoutePlan, plan: RoutePlan) -> bool:
    """Return whether halves are to be considered: always, or if a worker does more than any did before."""
    if job.halves != "auto":
        return job.halves == "on"
    most, until_now = most_layers(plan.routes), most_layers(before.routes)
    return bool(costs.unit_s) and (most > until_now or (before.halves and most == until_now))


def most_layers(routes: Sequence[Route]) -> int:
    """Return through how many layers the busiest worker takes microbatches in a step."""
    loads: dict[int, int] = {}
    for route, count in count_routes(routes):
        for segment in route:
            loads[segment.worker] = loads.get(segment.worker, 0) + count * (segment.end - segment.first)
    return max(loads.values(), default=0)


def split_kappa(costs: PhaseCosts) -> float:
    """Return the share of a pipeline's filling and draining that remains idle with halves: forward and input passes on
    the way, less the weights halves that are made meanwhile."""
    return max(0.0, 1 - 2 * _weights_part(costs))


def _weights_part(costs: PhaseCosts) -> float:
    """Return which share of a layer's passes is for the gradients of its weights. Until it is measured, this is half of
    the backward pass."""
    return costs.weights_share or (1 - costs.forward_share) / 2


def passes_span(costs: PhaseCosts, times: LayerTimes, plan: RoutePlan, *, halves: bool) -> float:
    """Return how long the passes of a step take if each starts as soon as it can; 0 if there are too many to look at.
    The unit is the time of one layer for one microbatch, made whole."""
    if sum(map(len, plan.routes)) > _LARGEST:
        return 0.0
    extra = costs.split_s / costs.unit_s if costs.unit_s else 0.0
    forward, weights = costs.forward_share, _weights_part(costs)
    lengths = PassLengths(forward=forward, backward=1 - forward)
    if halves:
        lengths = PassLengths(forward=forward, backward=1 - forward - weights + extra / 2, weights=weights + extra / 2)
    timed = time_tasks(plan.routes, halves=halves, lengths=lengths, work=times.segment_time)
    return max((one.ends for one in timed), default=0.0)
