"""The choice among recovery policies: takes the cheapest of the proposals that are exact enough for the user."""

from collections.abc import Mapping

import msgspec

from holdfast.core.elastic.announced_departure_policy import MIGRATE, SAVE, propose_migration, propose_save
from holdfast.core.elastic.drop_policy import DROP, propose_drop
from holdfast.core.elastic.drop_then_replace_policy import HYBRID, propose_hybrid
from holdfast.core.elastic.expected_liveput import Liveput, LossOutlook, expected_liveput
from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.layer_owners import count_alike, count_owners
from holdfast.core.elastic.loss_forecast import LossHistory, forecast_losses
from holdfast.core.elastic.plan_faults import plan_faults
from holdfast.core.elastic.plan_ground import Propose, survey
from holdfast.core.elastic.proposal import Infeasible, PhaseCosts, Proposal
from holdfast.core.elastic.replace_policy import REPLACE, propose_replace
from holdfast.core.elastic.reroute_policy import REROUTE, propose_reroute
from holdfast.core.elastic.rollback_policy import (
    DISK_ROLLBACK,
    MEMORY_ROLLBACK,
    propose_disk_rollback,
    propose_memory_rollback,
)
from holdfast.core.elastic.shadow_policy import REDUNDANT, propose_redundant
from holdfast.core.elastic.split_pass_choice import set_halves
from holdfast.core.elastic.stochastic_wiring_policy import STOCHASTIC, propose_stochastic
from holdfast.core.elastic.template_policy import RETEMPLATE, propose_retemplate
from holdfast.model.pipeline_routes import PipelineJob, PipelineSituation

__all__ = ["POLICIES", "ElasticChoice", "WeighedProposal", "choose_plan", "cost_of", "first_plan"]

POLICIES: Mapping[str, Propose] = {
    REPLACE: propose_replace,
    MIGRATE: propose_migration,
    REROUTE: propose_reroute,
    RETEMPLATE: propose_retemplate,
    REDUNDANT: propose_redundant,
    STOCHASTIC: propose_stochastic,
    DROP: propose_drop,
    HYBRID: propose_hybrid,
    SAVE: propose_save,
    MEMORY_ROLLBACK: propose_memory_rollback,
    DISK_ROLLBACK: propose_disk_rollback,
}


class WeighedProposal(msgspec.Struct, frozen=True):
    """A proposal with its cost, in seconds of one worker."""

    proposal: Proposal
    cost: float


class ElasticChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen proposal, all proposals that were compared (the cheapest first), and why other policies have none."""

    chosen: Proposal | None
    weighed: tuple[WeighedProposal, ...]
    refused: tuple[Infeasible, ...]


def choose_plan(
    job: PipelineJob,
    situation: PipelineSituation,
    costs: PhaseCosts,
    policies: Mapping[str, Propose] = POLICIES,
) -> ElasticChoice:
    """Return the choice among all policies. It contains the cheapest proposal whose results are at least as exact as
    `job.floor` (the least exactness that the user accepts). If two cost the same, the earlier policy wins."""
    weighed: list[WeighedProposal] = []
    refused: list[Infeasible] = []
    ground = survey(job, situation, costs)
    for name, propose in policies.items():
        found = ground.ask(propose)
        if isinstance(found, Infeasible):
            refused.append(found)
        elif found.semantics < job.floor:
            reason = f"results would be {found.semantics.name}, and the least to hold is {job.floor.name}"
            refused.append(Infeasible(policy=name, reason=reason))
        else:
            weighed.append(WeighedProposal(found, cost_of(job, situation, costs, found)))
    weighed.sort(key=lambda one: one.cost)
    chosen = weighed[0].proposal if weighed else None
    if chosen is not None:
        chosen = msgspec.structs.replace(chosen, plan=set_halves(job, costs, ground.times, ground.before, chosen.plan))
        assert not (wrong := list(plan_faults(job, situation, chosen.plan, chosen.semantics))), (chosen.policy, wrong)
    return ElasticChoice(chosen=chosen, weighed=tuple(weighed), refused=tuple(refused))


def cost_of(job: PipelineJob, situation: PipelineSituation, costs: PhaseCosts, proposal: Proposal) -> float:
    """Return what a proposal costs, in seconds of one worker. Included are the change to the new plan, the slower steps
    under the plan, the expected next failure, and the change back to the old plan."""
    workers = len(situation.held) + len(situation.lost)
    stopped = sum(proposal.downtime_s.values()) + proposal.lost_steps * costs.step_s
    slow = proposal.slow_steps * costs.step_s * (1 / max(proposal.slow_rate, 0.01) - 1)
    degraded_s = min(costs.repair_s, costs.change_s)
    if costs.losses is None:
        expected = min(1.0, costs.failures_per_s * workers * degraded_s)
        later = (1 - proposal.rate_after) * degraded_s + expected * _next_failure_s(job, situation, costs, proposal)
    else:
        later = degraded_s - forecast_liveput(job, situation, costs, proposal).expected_s
    if any(proposal.plan.held[number] for number in situation.leaving):
        later += _next_failure_s(job, situation, costs, proposal)  # those that leave take their layers with them
    back = _change_s(costs) if proposal.rate_after < 1 else 0.0
    return workers * (stopped + slow + later + back)


def forecast_liveput(job: PipelineJob, situation: PipelineSituation, costs: PhaseCosts, proposal: Proposal) -> Liveput:
    """Return what is expected of a proposal's plan until workers come or the plan changes for another reason, with the
    losses that past ones forecast."""
    plan = proposal.plan.then or proposal.plan
    live_s = costs.detect_s + costs.abort_s + _change_s(costs)
    outlook = LossOutlook(
        forecast=forecast_losses(costs.losses or LossHistory()),
        ahead_s=min(costs.repair_s, costs.change_s),
        live_s=live_s,
        rollback_s=live_s + costs.restart_s + job.layers * costs.storage_s,
        unsaved_s=_unsaved_steps(situation, proposal) * costs.step_s,
    )
    return expected_liveput(job, plan.held, proposal.rate_after, outlook)


def _change_s(costs: PhaseCosts) -> float:
    return costs.agree_s + costs.plan_s + costs.rebuild_s + costs.transfer_s + costs.verify_s


def _unsaved_steps(situation: PipelineSituation, proposal: Proposal) -> int:
    plan = proposal.plan
    return 0 if plan.saves else max(0, plan.resume_step - 1 - max(0, situation.stored))


def _next_failure_s(job: PipelineJob, situation: PipelineSituation, costs: PhaseCosts, proposal: Proposal) -> float:
    """Return for how long the next failure would stop the job, on average. It takes longer the more workers are the
    only owner of a layer."""
    plan = proposal.plan
    alike = count_alike(plan.held, situation.leaving)
    owners = count_owners(job.layers, alike)
    only = sum(any(owners[layer] == 1 for layer in mine) for mine in alike)  # who shares its layers is not among them
    alone = only / max(1, len(plan.held)) if all(owners) else 1.0
    again = _unsaved_steps(situation, proposal)
    rollback = costs.restart_s + job.layers * costs.storage_s + again * costs.step_s
    return costs.detect_s + costs.abort_s + _change_s(costs) + alone * rollback
