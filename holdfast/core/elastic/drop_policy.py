"""Dropping: stops damaged pipelines, and gives their microbatches to undamaged ones or leaves them out."""

from heapq import heapify, heapreplace

import msgspec

from holdfast.core.elastic.plan_ground import (
    PlanGround,
    live_proposal,
    rate_of,
    refuse_orphans,
)
from holdfast.core.elastic.proposal import Infeasible, Proposal
from holdfast.core.elastic.route_times import Route, add_loads, loads_of
from holdfast.model.pipeline_routes import RoutePlan, Semantics

DROP = "drop"


def propose_drop(ground: PlanGround) -> Proposal | Infeasible:
    """Propose to leave damaged pipelines out. Undamaged pipelines keep their inner groups, so only groups across
    pipelines are rebuilt."""
    job, situation, costs = ground.job, ground.situation, ground.costs
    if refused := refuse_orphans(DROP, ground):
        return refused
    broken = ground.broken
    if not broken:
        return Infeasible(policy=DROP, reason="every pipeline is whole")
    whole = [(route, count) for route, count in ground.counted if id(route) not in broken]
    if not whole:
        return Infeasible(policy=DROP, reason="no pipeline is whole")
    plan = RoutePlan(held=situation.held, routes=_give_to_whole(ground, broken, whole), resume_step=ground.resume_step)
    if job.floor is Semantics.BATCH_CHANGED:
        shrunk: tuple[Route, ...] = tuple(() if id(route) in broken else route for route in ground.before.routes)
        smaller = msgspec.structs.replace(plan, routes=shrunk)
        plan = max(plan, smaller, key=lambda one: rate_of(ground, one))
    left_out = sum(not route for route in plan.routes)
    given = sum(count for route, count in ground.counted if id(route) in broken) - left_out
    reason = f"whole pipelines take {given} microbatches, and {left_out} are left out"
    found = live_proposal(DROP, ground, plan, reason=reason)
    if isinstance(found, Proposal):
        found.downtime_s["rebuild"] = costs.regroup_s
    return found


def _give_to_whole(ground: PlanGround, broken: dict[int, Route], whole: list[tuple[Route, int]]) -> tuple[Route, ...]:
    """Return the routes, with each broken one replaced by the unbroken one whose busiest worker has the least work."""
    loads = loads_of(whole, ground.times)
    queue = [(_busiest(route, loads), number) for number, (route, _) in enumerate(whole)]
    heapify(queue)
    routes = []
    for route in ground.before.routes:
        routes.append(_take_least(queue, whole, loads, ground) if id(route) in broken else route)
    return tuple(routes)


def _busiest(route: Route, loads: dict[int, float]) -> float:
    return max([loads.get(segment.worker, 0.0) for segment in route])


def _take_least(
    queue: list[tuple[float, int]], whole: list[tuple[Route, int]], loads: dict[int, float], ground: PlanGround
) -> Route:
    while True:
        load, number = queue[0]
        route = whole[number][0]
        now = _busiest(route, loads)
        if now > load:  # it shares a worker with one that was taken meanwhile
            heapreplace(queue, (now, number))
            continue
        add_loads(loads, route, ground.times)
        heapreplace(queue, (_busiest(route, loads), number))
        return route
