"""The meeting of a pipeline's workers, at the start of the job and again in each generation after a failure.

Each worker reports what it has. All workers find the step that counts and choose the same plan by the same function.
Then layers are sent to the workers that need them by the plan.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from holdfast.client.elastic.held_layers import HeldLayers
from holdfast.client.elastic.layer_state import HOST, find_shared
from holdfast.client.elastic.rank_traffic import require_open
from holdfast.client.elastic.recovery_settlement import (
    RankReport,
    choose_costs,
    describe_situation,
    settle_step,
)
from holdfast.client.elastic.state_moves import STORAGE, StateMoves
from holdfast.client.elastic.step_phase_times import StepPhases
from holdfast.client.snapshot.seal_revocation import SEAL_FENCE
from holdfast.client.training.progress import here as progress
from holdfast.core.decoding import from_msgpack
from holdfast.core.elastic.layer_owners import Held
from holdfast.core.elastic.plan_choice import POLICIES, choose_plan, first_plan
from holdfast.core.elastic.proposal import Proposal
from holdfast.model.pipeline_routes import RoutePlan, Semantics


class NoPlanError(RuntimeError):
    """Raised if no policy can go on with the workers and layers that are left."""


class Recovery(NamedTuple):
    """What one recovery of a pipeline did, why, and how long it took."""

    policy: str
    step: int  # after which the pipeline went on
    again: int  # steps that were committed and are made again
    workers: int  # with which it went on
    semantics: Semantics
    reason: str
    expected_s: float  # without the detection
    took_s: float  # since the first worker's step broke off


class PipelineRecovery:
    """Takes part in the job's meetings on behalf of one worker."""

    def __init__(
        self,
        held: HeldLayers,
        phases: StepPhases,
        apply: Callable[[int, tuple[float, ...]], None],
        policies: Sequence[str],
    ) -> None:
        self._held, self._phases, self._apply = held, phases, apply
        self.recoveries: list[Recovery] = []
        self._policies = {name: POLICIES[name] for name in policies}

    def meet(self) -> None:
        """Agree with all other workers on a plan, and follow it. Raises NoPlanError."""
        held, phases = self._held, self._phases
        held.renew_traffic(find_device())
        began_at = time.time()
        phases.begin()
        phases.enter("agree")
        seal = SEAL_FENCE.make_pass()
        reports = _exchange_reports(held.make_report(phases.step_s))
        require_open(seal)
        held.line = reports[0].line
        fresh = not any(report.meeting or report.snapshots for report in reports)
        proposal = None if fresh else self._choose(reports)
        plan = proposal.plan if proposal else _begin_plan(held, reports)
        phases.enter("move")
        self._follow(plan, settle_step(reports).held)
        held.meeting = max(report.meeting for report in reports) + 1
        held.incidents = max(report.incidents for report in reports)
        if held.vote[0] > held.committed:
            held.vote = (0, ())
        phases.enter("")
        progress.on_restored(held.committed, time.time() - began_at)
        if proposal is not None:
            self._note_recovery(reports, proposal, began_at)
        elif held.committed and dist.get_rank() == 0:
            _say(f"it begins again after step {held.committed}, which is on storage")

    def _choose(self, reports: Sequence[RankReport]) -> Proposal:
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

    def change_plan(self) -> bool:
        """Switch to the next plan if it begins at the next step; return whether it did. All workers call this."""
        held = self._held
        then = held.bare.then
        if then is None or then.resume_step != held.committed + 1:
            return False
        self._follow(then, held.plan.held)
        return True

    def _follow(self, bare: RoutePlan, have: Held) -> None:
        held, rank = self._held, dist.get_rank()
        plan = held.complete(bare, have)
        seal = SEAL_FENCE.make_pass()
        moves = StateMoves(held.make_unit, held.snapshots, held.files, held.traffic, seal)
        moves.follow(plan, held.units, rank)
        if shared := find_shared(held.units.values()):
            raise ValueError(shared)
        held.take_plan(bare, plan, rank)

    def _note_recovery(self, reports: Sequence[RankReport], proposal: Proposal, began_at: float) -> None:
        """Record a recovery, keep its measured times for the next choice, and on rank 0 print a line about it."""
        held, took_s = self._held, self._phases.took_s
        broke_at = min((report.broke_at for report in reports if report.broke_at), default=began_at)
        recovery = Recovery(
            policy=proposal.policy,
            step=held.committed,
            again=proposal.lost_steps,
            workers=len(reports),
            semantics=proposal.semantics,
            reason=proposal.reason,
            expected_s=sum(seconds for phase, seconds in proposal.downtime_s.items() if phase != "detect"),
            took_s=time.time() - broke_at,
        )
        self.recoveries.append(recovery)
        costs = held.costs.seen_phase("rebuild", max(0.0, began_at - broke_at))
        held.costs = costs.seen_phase("agree", took_s.get("agree", 0.0)).seen_phase("plan", took_s.get("plan", 0.0))
        held.incidents, held.broke_at = held.incidents + 1, 0.0
        if dist.get_rank() == 0:
            _say(describe_recovery(recovery))


def find_device() -> torch.device:
    """Return the device whose tensors the default group sends: the current GPU over NCCL, the host over gloo."""
    named = dist.get_backend_config() if dist.is_initialized() else ""
    backends = {part.rpartition(":")[2] for part in named.split(",")}
    if "nccl" in backends and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if "gloo" in backends:
        return HOST
    raise RuntimeError('an ElasticPipeline needs init_process_group("gloo") or init_process_group("nccl")')


def _exchange_reports(mine: RankReport) -> list[RankReport]:
    told: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(told, msgspec.msgpack.encode(mine))
    return [from_msgpack(one, RankReport) for one in told]


def _begin_plan(held: HeldLayers, reports: Sequence[RankReport]) -> RoutePlan:
    """Return the plan of a job that starts, or that starts again from storage after the loss of all workers."""
    stored = min(report.stored for report in reports)
    sources = (STORAGE,) * held.job.layers
    plan = first_plan(held.job, len(reports))
    return msgspec.structs.replace(plan, rollback=True, sources=sources, resume_step=max(0, stored) + 1)


def describe_recovery(recovery: Recovery) -> str:
    """Return a line about a finished recovery: what was done, its expected cost and its real cost."""
    again = f"{recovery.again} steps are made again" if recovery.again else "no step is made again"
    return (
        f"{recovery.policy} on {recovery.workers} workers after step {recovery.step}: {recovery.reason}; {again}; "
        f"{recovery.semantics.name}; {recovery.took_s:.2f} s since a step broke off, "
        f"{recovery.expected_s:.2f} s expected"
    )


def _say(text: str) -> None:
    print(f"holdfast: pipeline: {text}", file=sys.stderr, flush=True)
