"""Redundant layers: a worker also keeps the layers of the next worker up to date, and computes them if that worker is
lost."""

from holdfast.core.elastic.layer_owners import Held, HeldRuns, missing_layers
from holdfast.core.elastic.plan_ground import (
    PlanGround,
    broken_routes,
    join_segments,
    live_proposal,
    name_orphans,
    rename_route,
)
from holdfast.core.elastic.proposal import Infeasible, Proposal
from holdfast.core.elastic.reroute_policy import reroute_all
from holdfast.core.elastic.route_times import Route, count_routes, exchange_routes
from holdfast.model.pipeline_routes import RoutePlan

REDUNDANT = "redundant layers"


def shadows_of(plan: RoutePlan) -> Held:
    """Return for each worker the layers that it should also keep up to date, as a backup: those that the next workers
    on its routes hold."""
    found: list[set[int]] = [set() for _ in plan.held]
    for route, _ in count_routes(plan.routes):
        for segment, following in zip(route, (*route[1:], *route[:1]), strict=True):
            found[segment.worker].update(plan.held[following.worker])
    return tuple(tuple(sorted(more - set(mine))) for more, mine in zip(found, plan.held, strict=True))


def propose_redundant(ground: PlanGround) -> Proposal | Infeasible:
    """Propose that workers which keep the lost layers as shadows compute them. If possible, one worker computes all
    layers of a lost worker."""
    job, situation = ground.job, ground.situation
    if not any(situation.shadows):
        return Infeasible(policy=REDUNDANT, reason="nobody keeps layers beside its own")
    both = tuple(tuple(sorted({*mine, *more})) for mine, more in zip(situation.held, situation.shadows, strict=True))
    if orphans := missing_layers(job, both):
        return Infeasible(policy=REDUNDANT, reason=name_orphans(orphans))
    routes = _hand_over(ground, both)
    if broken_routes(count_routes(routes), HeldRuns(both, situation.leaving)):
        stay = tuple(() if number in situation.leaving else mine for number, mine in enumerate(both))
        if orphans := missing_layers(job, stay):
            return Infeasible(policy=REDUNDANT, reason=name_orphans(orphans))
        routes = reroute_all(ground, both, situation.leaving)
    held = _held_for(situation.held, routes)
    plan = RoutePlan(held=held, routes=routes, resume_step=ground.resume_step)
    return live_proposal(REDUNDANT, ground, plan, reason="shadows of lost layers are computed from now on")


def _hand_over(ground: PlanGround, both: Held) -> tuple[Route, ...]:
    """Return the routes with each lost worker replaced by a worker that has all its layers. A worker that keeps them as
    shadows is preferred. Among several, it is the worker that has replaced the fewest lost workers so far."""
    runs, sets = HeldRuns(both), [frozenset(mine) for mine in both]
    taken = [0] * len(both)
    names: dict[int, int] = {}
    for number, mine in enumerate(ground.lost):
        able = [n for n, has in enumerate(sets) if has.issuperset(mine) and n not in ground.situation.leaving]
        shadow = [n for n in able if not set(mine).issubset(ground.situation.held[n])]
        if mine and able:
            heir = min(shadow or able, key=lambda one: (taken[one], one))
            names[-1 - number] = heir
            taken[heir] += 1
    return exchange_routes(
        ground.before.routes, {id(route): _renamed(route, names, runs) for route, _ in ground.counted}
    )


def _renamed(route: Route, names: dict[int, int], runs: HeldRuns) -> Route:
    renamed = rename_route(route, names)
    if renamed is route or not all(map(runs.can_compute, renamed)):
        return route
    return join_segments(renamed)


def _held_for(held: Held, routes: tuple[Route, ...]) -> Held:
    """Return the layers that each worker holds, with the shadow layers that these routes make it compute."""
    found = [set(mine) for mine in held]
    for route, _ in count_routes(routes):
        for segment in route:
            found[segment.worker].update(range(segment.first, segment.end))
    return tuple(tuple(sorted(mine)) for mine in found)
