"""The first plan of a job: pipelines of equal stages, with the workers that are left over as standbys."""

from holdfast.core.elastic.layer_owners import fits_memory
from holdfast.core.elastic.route_times import Route
from holdfast.model.pipeline_routes import PipelineJob, RoutePlan, RouteSegment


def first_plan(job: PipelineJob, workers: int) -> RoutePlan:
    """Return the plan with which a job begins: worker `d * stages + p` has stage `p` of pipeline `d`.

    If there are fewer workers than stages, there is one pipeline with as many stages as workers. Raise ValueError if
    layers do not fit.
    """
    stages = max(1, min(job.stages, job.layers, workers))
    pipelines = max(1, min(workers // stages, job.microbatches, job.pipelines or workers))
    if workers < 1:
        raise ValueError("a plan needs at least one worker")
    cuts = stage_cuts(job.layers, stages)
    held = [tuple(range(first, end)) for first, end in cuts] * pipelines + [()] * (workers - pipelines * stages)
    if not fits_memory(job, tuple(held)):
        raise ValueError(f"{job.layers} layers on {stages} stages are more than {job.capacity} on a worker")
    members = [range(d * stages, (d + 1) * stages) for d in range(pipelines)]
    shares = [(d + 1) * job.microbatches // pipelines - d * job.microbatches // pipelines for d in range(pipelines)]
    routes = [
        route
        for mine, share in zip(members, shares, strict=True)
        for route in [straight_route(cuts, tuple(mine))] * share
    ]
    return RoutePlan(held=tuple(held), routes=tuple(routes))


def stage_cuts(layers: int, stages: int) -> list[tuple[int, int]]:
    """Cut layers into stages whose sizes differ by one at most."""
    return [(p * layers // stages, (p + 1) * layers // stages) for p in range(stages)]


def straight_route(cuts: list[tuple[int, int]], members: tuple[int, ...]) -> Route:
    """Return the route of a microbatch through one pipeline: `members[i]` computes the stage `cuts[i]`."""
    return tuple(
        RouteSegment(worker=member, first=first, end=end) for (first, end), member in zip(cuts, members, strict=True)
    )
