"""Replacement: a standby or new worker takes a lost worker's place in all routes, and gets its layers from a live
owner."""

from collections.abc import Sequence

from holdfast.core.elastic.layer_owners import Held, newcomers, transfers_to
from holdfast.core.elastic.plan_ground import PlanGround, live_proposal, refuse_orphans, rename_route
from holdfast.core.elastic.proposal import Infeasible, Proposal
from holdfast.core.elastic.route_times import Route, exchange_routes
from holdfast.model.pipeline_routes import RoutePlan

REPLACE = "replace"


def propose_replace(ground: PlanGround) -> Proposal | Infeasible:
    """Propose that standbys take the places of all lost workers that held something."""
    job, situation = ground.job, ground.situation
    if refused := refuse_orphans(REPLACE, ground):
        return refused
    filled = fill_places(ground)
    if isinstance(filled, str):
        return Infeasible(policy=REPLACE, reason=filled)
    held, routes, taken = filled
    transfers = transfers_to(job, situation, held)
    plan = RoutePlan(held=held, routes=routes, transfers=transfers, resume_step=ground.resume_step)
    reason = f"{taken} standbys take the places of those lost" if taken else "everyone who holds layers is here"
    return live_proposal(REPLACE, ground, plan, reason=reason)


def fill_places(ground: PlanGround, away: Sequence[int] = ()) -> tuple[Held, tuple[Route, ...], int] | str:
    """Let new workers take the places of lost workers and of the workers `away`. Return the layers that each worker
    then holds, all routes, and the number of new workers used. If it is impossible, return why."""
    before = ground.before
    places = {-1 - number: tuple(mine) for number, mine in enumerate(ground.lost) if mine}
    places |= {number: before.held[number] for number in away if before.held[number]}
    used = {segment.worker for route, _ in ground.counted for segment in route}
    unknown = {number for number in used if number < 0} - places.keys()
    if unknown:
        return "it is not known what a lost worker held"
    names: dict[int, int] = {}
    held = [() if number in away else mine for number, mine in enumerate(before.held)]
    free = [
        n for n in newcomers(ground.situation) if not held[n] and n not in away
    ]  # one whose place is kept comes back to that
    if len(places) > len(free):
        return f"{len(places)} workers are to be replaced, and {len(free)} stand by"
    for place, number in zip(sorted(places, reverse=True), free, strict=False):
        names[place] = number
        held[number] = places[place]
    routes = {id(route): rename_route(route, names) for route, _ in ground.counted}
    return tuple(held), exchange_routes(before.routes, routes), len(names)
