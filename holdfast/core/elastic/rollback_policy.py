"""Rollback: all workers go back to the newest step of which every layer exists, in a live worker's memory or on
storage."""

from collections.abc import Sequence

from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.layer_owners import Held, added_memory, fits_memory, spare_copies
from holdfast.core.elastic.plan_ground import PlanGround, rate_of, rename_route, semantics_of, stop_phases
from holdfast.core.elastic.proposal import Infeasible, PhaseCosts, Proposal
from holdfast.core.elastic.replace_policy import fill_places
from holdfast.core.elastic.route_times import Route, count_routes, exchange_routes
from holdfast.model.pipeline_routes import PipelineJob, PipelineSituation, RoutePlan

MEMORY_ROLLBACK = "memory rollback"
DISK_ROLLBACK = "disk rollback"
STORAGE = -1  # as a layer's source


def propose_memory_rollback(ground: PlanGround) -> Proposal | Infeasible:
    """Propose to go back to the newest step of which every layer is in a live worker's memory or on storage."""
    step, sources = newest_snapshots(ground.job, ground.situation)
    if step < 0:
        return Infeasible(policy=MEMORY_ROLLBACK, reason="no step has a snapshot of every layer in a live memory")
    return _rollback(MEMORY_ROLLBACK, ground, step, sources)


def propose_disk_rollback(ground: PlanGround) -> Proposal | Infeasible:
    """Propose to go back to the newest whole checkpoint."""
    job, situation = ground.job, ground.situation
    if situation.stored < 0:
        return Infeasible(policy=DISK_ROLLBACK, reason="there is no checkpoint")
    sources = (STORAGE,) * job.layers
    return _rollback(DISK_ROLLBACK, ground, situation.stored, sources)


def newest_snapshots(job: PipelineJob, situation: PipelineSituation) -> tuple[int, tuple[int, ...]]:
    """Return the newest step at which every layer can be had, and for each layer where it is. A layer can be had from a
    worker's memory or, at the stored step, from storage. Return -1 and an empty tuple if there is no such step."""
    found: dict[int, dict[int, int]] = {}  # step -> layer -> who has it
    for number, kept in enumerate(situation.snapshots):
        for layer, step in kept:
            if step <= situation.committed:
                found.setdefault(step, {}).setdefault(layer, number)
    for step in sorted(found, reverse=True):
        by_layer = found[step]
        if step == situation.stored:
            by_layer = dict.fromkeys(range(job.layers), STORAGE) | by_layer
        if len(by_layer) == job.layers:
            return step, tuple(by_layer[layer] for layer in range(job.layers))
    return -1, ()


def _rollback(policy: str, ground: PlanGround, step: int, sources: tuple[int, ...]) -> Proposal | Infeasible:
    placed = place_freely(ground)
    if isinstance(placed, str):
        return Infeasible(policy=policy, reason=placed)
    held, routes = placed
    plan = RoutePlan(held=held, routes=routes, rollback=True, sources=sources, resume_step=step + 1)
    costs = ground.costs
    downtime = stop_phases(ground)
    downtime["restore"] = _restore_s(costs, held, sources)
    downtime["verify"] = costs.verify_s
    if policy == DISK_ROLLBACK:
        downtime["restart"] = costs.restart_s
    return Proposal(
        policy=policy,
        plan=plan,
        downtime_s=downtime,
        rate_after=rate_of(ground, plan),
        lost_steps=ground.situation.committed - step,
        extra_memory=added_memory(ground.before.held, held),
        tolerance=spare_copies(ground.job.layers, held, ground.situation.leaving),
        semantics=semantics_of(ground, plan),
        reason=f"step {step} is whole {'on storage' if policy == DISK_ROLLBACK else 'in live memories'}",
    )


def _restore_s(costs: PhaseCosts, held: Held, sources: tuple[int, ...]) -> float:
    """Return how long a restore takes: the longest time that any worker needs to restore or to send its layers."""
    given = [0] * len(held)
    longest = 0.0
    for number, mine in enumerate(held):
        remote = [layer for layer in mine if sources[layer] not in (number, STORAGE)]
        for layer in remote:
            given[sources[layer]] += 1
        stored = sum(sources[layer] == STORAGE for layer in mine)
        longest = max(longest, (len(mine) - stored) * costs.memory_s + stored * costs.storage_s)
    return max(longest, max(given, default=0) * costs.transfer_s)


def place_freely(ground: PlanGround) -> tuple[Held, tuple[Route, ...]] | str:
    """Return layers and routes for the workers that stay, or why there are none. If there are enough standbys, they
    take the places of lost workers. Otherwise the plan is made anew."""
    filled = fill_places(ground, ground.situation.leaving)
    if not isinstance(filled, str) and fits_memory(ground.job, filled[0]):
        return filled[0], filled[1]
    stay = [number for number in range(len(ground.situation.held)) if number not in ground.situation.leaving]
    if not stay:
        return "all workers are about to leave"
    try:
        fresh = first_plan(ground.job, len(stay))
    except ValueError as error:
        return str(error)
    return spread_over(fresh, stay, len(ground.situation.held))


def spread_over(plan: RoutePlan, members: Sequence[int], workers: int) -> tuple[Held, tuple[Route, ...]]:
    """Return a plan's layers and routes, renumbered for a job of `workers` workers: the plan's worker i becomes
    `members[i]`, and workers that are not members hold nothing."""
    names = dict(enumerate(members))
    held: list[tuple[int, ...]] = [()] * workers
    for number, mine in enumerate(plan.held):
        held[names[number]] = mine
    routes = {id(route): rename_route(route, names) for route, _ in count_routes(plan.routes)}
    return tuple(held), exchange_routes(plan.routes, routes)
