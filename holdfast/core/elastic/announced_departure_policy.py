"""Policies for workers that are known to leave: move their layers to other workers, or save all layers before the
workers leave."""

import msgspec

from holdfast.core.elastic.layer_owners import missing_layers, owners_by_layer, transfers_to
from holdfast.core.elastic.plan_ground import PlanGround, live_proposal, name_orphans, refuse_orphans
from holdfast.core.elastic.proposal import Infeasible, Proposal
from holdfast.core.elastic.replace_policy import fill_places
from holdfast.core.elastic.reroute_policy import reroute_all
from holdfast.model.pipeline_routes import RoutePlan

MIGRATE = "live migration"
SAVE = "just-in-time save"


def propose_migration(ground: PlanGround) -> Proposal | Infeasible:
    """Propose that newcomers take the places of lost and leaving workers. If newcomers are too few, propose that peers
    do the work of leaving workers."""
    job, situation, costs = ground.job, ground.situation, ground.costs
    if not situation.leaving:
        return Infeasible(policy=MIGRATE, reason="nobody is known to leave")
    if refused := refuse_orphans(MIGRATE, ground):
        return refused
    filled = fill_places(ground, situation.leaving)
    if not isinstance(filled, str):
        held, routes, taken = filled
        transfers = transfers_to(job, situation, held)
        plan = RoutePlan(held=held, routes=routes, transfers=transfers, resume_step=ground.resume_step)
        return live_proposal(MIGRATE, ground, plan, reason=f"{taken} newcomers take the places of those that leave")
    stay = tuple(() if number in situation.leaving else mine for number, mine in enumerate(situation.held))
    if orphans := missing_layers(job, stay):
        reason = f"{filled}; of those that stay, {name_orphans(orphans)}"
        return Infeasible(policy=MIGRATE, reason=reason)
    plan = RoutePlan(held=stay, routes=reroute_all(ground, stay, situation.leaving), resume_step=ground.resume_step)
    return live_proposal(MIGRATE, ground, plan, reason="peers do the work of those that leave", kappa=costs.kappa)


def propose_save(ground: PlanGround) -> Proposal | Infeasible:
    """Propose to write every layer to storage now, so that no step has to be made again when workers leave."""
    situation, costs = ground.situation, ground.costs
    if not situation.leaving:
        return Infeasible(policy=SAVE, reason="nobody is known to leave")
    if refused := refuse_orphans(SAVE, ground):
        return refused
    saves = _share_saves(ground)
    routes = reroute_all(ground, situation.held)
    plan = RoutePlan(held=situation.held, routes=routes, saves=saves, resume_step=ground.resume_step)
    found = live_proposal(SAVE, ground, plan, reason=f"step {situation.committed} is saved before workers leave")
    if isinstance(found, Infeasible):
        return found
    most = max(saves.count(number) for number in set(saves))
    return msgspec.structs.replace(found, downtime_s=found.downtime_s | {"save": most * costs.save_s})


def _share_saves(ground: PlanGround) -> tuple[int, ...]:
    """Return for each layer the owner that writes it to storage. All owners write about equally many layers."""
    written: dict[int, int] = {}
    found = []
    for owners in owners_by_layer(ground.job.layers, ground.situation.held):
        owner = min(owners, key=lambda one: (written.get(one, 0), one))
        written[owner] = written.get(owner, 0) + 1
        found.append(owner)
    return tuple(found)
