"""The meeting of a pipeline's workers: at the start of the job, and again in each generation after a failure.

Each says what it has. All find the step that counts, choose the same plan by the same function, and bring their layers
to where the plan wants them.
"""

import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import torch.distributed as dist

from holdfast.client.elastic.held_layers import HeldLayers
from holdfast.client.elastic.layer_units import find_shared
from holdfast.client.elastic.state_moves import STORAGE, StateMoves
from holdfast.client.elastic.step_phases import StepPhases
from holdfast.client.elastic.worker_reports import (
    WorkerReport,
    choose_costs,
    describe_situation,
    settle_step,
)
from holdfast.client.elastic.worker_traffic import WorkerTraffic
from holdfast.client.training.progress import here as progress
from holdfast.core.decoding import from_msgpack
from holdfast.core.elastic.plan_choice import POLICIES, choose_plan, first_plan
from holdfast.core.elastic.proposal import Proposal
from holdfast.model.route_plan import RoutePlan


class NoPlanError(RuntimeError):
    """No policy can go on from what is left."""


class PipelineRecovery:
    """Lets one worker take part in the meetings of its job."""

    def __init__(
        self,
        held: HeldLayers,
        phases: StepPhases,
        apply: Callable[[int, tuple[float, ...]], None],
        policies: Sequence[str],
    ) -> None:
        self._held, self._phases, self._apply = held, phases, apply
        self._policies = {name: POLICIES[name] for name in policies}

    def meet(self) -> None:
        """Agree with all other workers on a plan, and follow it. Raises NoPlanError."""
        if not dist.is_initialized() or str(dist.get_backend()) != "gloo":
            raise RuntimeError('an ElasticPipeline needs init_process_group("gloo"); other backends were not tried')
        held, phases = self._held, self._phases
        began_at = time.time()
        phases.begin()
        phases.enter("agree")
        reports = _exchange_reports(held.make_report(phases.step_s))
        held.line = reports[0].line
        fresh = not any(report.meeting or report.snapshots for report in reports)
        proposal = None if fresh else self._choose(reports)
        plan = proposal.plan if proposal else _begin_plan(held, reports)
        phases.enter("move")
        traffic = WorkerTraffic(held.device)
        StateMoves(held.make_unit, held.snapshots, held.files, traffic).follow(plan, held.units, dist.get_rank())
        if shared := find_shared(held.units.values()):
            raise ValueError(shared)
        self._take_plan(plan, reports)
        phases.enter("")
        progress.on_restored(held.committed, time.time() - began_at)
        if dist.get_rank() == 0:
            _tell(reports, proposal, plan)
        self._learn(reports, proposal, began_at)

    def _choose(self, reports: Sequence[WorkerReport]) -> Proposal:
        held = self._held
        settled = settle_step(reports)
        if held.ready == settled.committed and settled.totals:
            self._apply(settled.committed, settled.totals)  # in layers that have not made it
        for unit in held.units.values():
            unit.drop_gradients()
        held.ready = 0
        self._phases.enter("plan")
        situation = describe_situation(reports, settled)
        costs = choose_costs(reports)
        choice = choose_plan(held.job, situation, costs, self._policies)
        held.costs = costs
        if choice.chosen is None:
            told = "; ".join(f"{one.policy}: {one.reason}" for one in choice.refused)
            raise NoPlanError(f"no policy can go on with the pipeline ({told})")
        return choice.chosen

    def _take_plan(self, plan: RoutePlan, reports: Sequence[WorkerReport]) -> None:
        held = self._held
        held.plan, held.worker = plan, dist.get_rank()
        held.meeting = max(report.meeting for report in reports) + 1
        held.committed = plan.resume_step - 1
        held.incidents = max(report.incidents for report in reports)
        if held.vote[0] > held.committed:
            held.vote = (0, ())

    def _learn(self, reports: Sequence[WorkerReport], proposal: Proposal | None, began_at: float) -> None:
        """Note what this recovery took, for the next choice."""
        held, took_s = self._held, self._phases.took_s
        if proposal is None:
            return
        broke_at = min((report.broke_at for report in reports if report.broke_at), default=began_at)
        costs = held.costs.seen_phase("rebuild", max(0.0, began_at - broke_at))
        costs = costs.seen_phase("agree", took_s.get("agree", 0.0)).seen_phase("plan", took_s.get("plan", 0.0))
        held.costs, held.incidents, held.broke_at = costs, held.incidents + 1, 0.0


def _exchange_reports(mine: WorkerReport) -> list[WorkerReport]:
    told: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(told, msgspec.msgpack.encode(mine))
    return [from_msgpack(one, WorkerReport) for one in told]


def _begin_plan(held: HeldLayers, reports: Sequence[WorkerReport]) -> RoutePlan:
    """Return the plan of a job that begins, or of one that begins again from storage because all workers were lost."""
    stored = min(report.stored for report in reports)
    sources = (STORAGE,) * held.job.layers
    plan = first_plan(held.job, len(reports))
    return msgspec.structs.replace(plan, rollback=True, sources=sources, resume_step=max(0, stored) + 1)


def _tell(reports: Sequence[WorkerReport], proposal: Proposal | None, plan: RoutePlan) -> None:
    if proposal is None:
        if plan.resume_step == 1:
            return
        text = f"it begins again after step {plan.resume_step - 1}, which is on storage"
    else:
        text = describe_recovery(reports, proposal, time.time())
    print(f"holdfast: pipeline: {text}", file=sys.stderr, flush=True)


def describe_recovery(reports: Sequence[WorkerReport], proposal: Proposal, now: float) -> str:
    """Return a line about a recovery that is over: the policy, what it was expected to take and took, its price."""
    expected_s = sum(took_s for phase, took_s in proposal.downtime_s.items() if phase != "detect")
    broke_at = min((report.broke_at for report in reports if report.broke_at), default=now)
    again = f"{proposal.lost_steps} steps made again" if proposal.lost_steps else "no step lost"
    return (
        f"{proposal.policy} on {len(reports)} workers, {proposal.reason}; {again}, "
        f"{proposal.semantics.name}; {now - broke_at:.2f} s after the step broke off, {expected_s:.2f} s expected"
    )
