"""The meeting of a pipeline's workers, at the start of the job and again in each generation after a failure.

Each worker reports what it has. All workers find the step that counts and choose the same plan by the same function.
Then layers are sent to the workers that need them by the plan.
"""

import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import torch
import torch.distributed as dist

from holdfast.client.checkpointing.pickle_free_collectives import gather_values
from holdfast.client.elastic.held_layers import HeldLayers
from holdfast.client.elastic.layer_state import HOST, find_shared
from holdfast.client.elastic.rank_traffic import require_open
from holdfast.client.elastic.recovery_account import (
    Recovery,
    StepWatch,
    compare_phases,
    describe_forecast,
    describe_hand_over,
    describe_recovery,
    describe_slow,
    describe_steps,
    gather_longest,
    learn_costs,
)
from holdfast.client.elastic.recovery_settlement import (
    RankReport,
    choose_costs,
    compare_workers,
    count_losses,
    describe_situation,
    find_finished,
    settle_step,
)
from holdfast.client.elastic.state_moves import STORAGE, StateMoves
from holdfast.client.elastic.step_phase_times import StepPhases
from holdfast.client.snapshot.seal_fence import SEAL_FENCE
from holdfast.client.training.progress import here as progress
from holdfast.core.elastic.announced_departure_policy import MIGRATE, SAVE
from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.hand_over import plan_departure
from holdfast.core.elastic.layer_owners import Held
from holdfast.core.elastic.plan_choice import POLICIES, choose_plan, forecast_liveput
from holdfast.core.elastic.plan_ground import predict_step_s, survey
from holdfast.core.elastic.proposal import Proposal
from holdfast.model.pipeline_routes import RoutePlan


class NoPlanError(RuntimeError):
    """Raised if no policy can go on with the workers and layers that are left."""


class PipelineRecovery:
    """Takes part in the job's meetings on behalf of one worker."""

    def __init__(
        self,
        held: HeldLayers,
        phases: StepPhases,
        apply: Callable[[int, tuple[float, ...]], None],
        policies: Sequence[str],
    ) -> None:
        self._held, self.phases, self._apply = held, phases, apply
        self.recoveries: list[Recovery] = []
        self._named = frozenset(policies)
        self._policies = {name: POLICIES[name] for name in policies if name in POLICIES and name not in (MIGRATE, SAVE)}
        self._watch = StepWatch()
        self._expected_step_s = 0.0

    def meet(self) -> None:
        """Agree with all other workers on a plan, and follow it. Raises NoPlanError."""
        held, phases = self._held, self.phases
        if taken := held.early.take_back(held.units):
            layers = ", ".join(map(str, taken))
            print_line(f"a rank takes back step {held.committed + 1}, made ahead of the vote, in layers {layers}")
        held.take_over()
        held.renew_traffic(find_device())
        began_at = time.time()
        phases.begin()
        phases.enter("agree")
        seal = SEAL_FENCE.make_pass()
        reports = gather_values(held.make_report(phases.step_s, phases.rest_s), RankReport)
        require_open(seal)
        held.line = reports[0].line
        fresh = not any(report.meeting or report.snapshots for report in reports)
        proposal = None if fresh else self._choose(reports)
        plan = proposal.plan if proposal else _begin_plan(held, reports)
        self._follow(plan, settle_step(reports).held)
        held.reused = find_finished(reports, held.plan)
        held.made = held.made.keep(held.reused)
        held.watched_since, held.announced = time.monotonic(), 0
        held.meeting, held.changes = max(report.meeting for report in reports) + 1, 0
        held.incidents = max(report.incidents for report in reports)
        held.handed = {}
        if held.vote[0] > held.committed:
            held.vote = (0, ())
        phases.enter("")
        progress.on_restored(held.committed, time.time() - began_at)
        if proposal is not None:
            self._note_recovery(reports, proposal, began_at)
        elif held.committed and dist.get_rank() == 0:
            print_line(f"it begins again after step {held.committed}, which is on storage")

    def _choose(self, reports: Sequence[RankReport]) -> Proposal:
        held = self._held
        settled = settle_step(reports)
        if held.ready == settled.committed and settled.totals:
            self._apply(settled.committed, settled.totals)  # in layers that have not made it
        for unit in held.units.values():
            unit.drop_gradients()
        held.ready = 0
        self.phases.enter("plan")
        measured = compare_workers(reports, held.job.layers)
        situation = msgspec.structs.replace(describe_situation(reports, settled), speeds=measured.speeds)
        held.costs = count_losses(choose_costs(reports, measured), reports, situation)
        choice = choose_plan(held.job, situation, held.costs, self._policies)
        if choice.chosen is None:
            told = "; ".join(f"{one.policy}: {one.reason}" for one in choice.refused)
            raise NoPlanError(f"no policy can go on with the pipeline ({told})")
        self._expected_step_s = predict_step_s(survey(held.job, situation, held.costs), choice.chosen.plan)
        if dist.get_rank() == 0:
            if slow := describe_slow(measured.speeds):
                print_line(slow)
            print_line(describe_forecast(held.costs, forecast_liveput(held.job, situation, held.costs, choice.chosen)))
        return choice.chosen

    def change_plan(self) -> bool:
        """Switch to the next plan if it begins at the next step; return whether it did. All workers call this."""
        held = self._held
        then = held.bare.then
        if then is None or then.resume_step != held.committed + 1:
            return False
        self.switch_plan(then)
        return True

    def switch_plan(self, bare: RoutePlan) -> None:
        """Follow another plan from the next step on, with the same workers. All of them call this between two steps."""
        held = self._held
        self._watch.end()
        plan = held.complete(bare, held.plan.held)
        if plan.transfers or plan.held != held.plan.held:
            self._follow(bare, held.plan.held)
        else:  # no state moves, so there is nothing to compare
            held.take_plan(bare, plan, dist.get_rank())
        held.changes += 1

    def hand_over(self, leaving: tuple[int, ...] | None) -> None:
        """Copy the layers that only leaving workers hold to workers that stay. Call this between two steps, on all
        workers; `leaving` is None on a worker that has not been told yet."""
        held = self._held
        told = gather_values((leaving is not None, leaving or ()), tuple[bool, tuple[int, ...]])
        if (True, ()) in told:
            self._save(held.files.newest_whole())
            return
        gone = sorted({rank for _, mine in told for rank in mine})
        held.announced = len(gone)
        migrates, saves = MIGRATE in self._named, SAVE in self._named and held.files.is_there
        departure = plan_departure(held.bare.held, gone, migrates=migrates, saves=saves, capacity=held.job.capacity)
        if departure.saves and held.files.newest_whole() < held.committed:
            held.store_layers()
        moves = StateMoves(held.make_unit, held.snapshots, held.files, held.traffic, SEAL_FENCE.make_pass())
        held.handed = moves.copy(departure.transfers, held.units, dist.get_rank())
        if dist.get_rank() == 0:
            print_line(describe_hand_over(held.committed, gone, departure))

    def _save(self, stored: int) -> None:
        """Write all layers to storage, because all workers are about to leave. Return once all are written."""
        held = self._held
        if stored < held.committed:
            held.store_layers()
        dist.barrier()
        if dist.get_rank() == 0:
            print_line(f"all workers are about to leave: storage has all layers after step {held.committed}")

    def _follow(self, bare: RoutePlan, have: Held) -> None:
        held, rank = self._held, dist.get_rank()
        plan = held.complete(bare, have)
        moves = StateMoves(held.make_unit, held.snapshots, held.files, held.traffic, SEAL_FENCE.make_pass())
        self.phases.enter("restore" if plan.rollback else "move")
        moves.fetch(plan, held.units, rank)
        self.phases.enter("verify")
        moves.settle(plan, held.units, rank)
        if shared := find_shared(held.units.values()):
            raise ValueError(shared)
        held.take_plan(bare, plan, rank)

    def _note_recovery(self, reports: Sequence[RankReport], proposal: Proposal, began_at: float) -> None:
        """Record a recovery, keep its measured times for the next choice, and on rank 0 print a line about it."""
        held = self._held
        broke_at = min((report.broke_at for report in reports if report.broke_at), default=began_at)
        took_s = {"rebuild": max(0.0, began_at - broke_at), **self.phases.took_s}
        phases = compare_phases(proposal, gather_longest(took_s))
        recovery = Recovery(
            policy=proposal.policy,
            step=held.committed,
            again=proposal.lost_steps,
            workers=len(reports),
            semantics=proposal.semantics,
            reason=proposal.reason,
            expected_s=sum(times.expected_s for times in phases.values()),
            took_s=time.time() - broke_at,
            phases=phases,
            kept=len(held.reused),
            halves=held.plan.halves,
            before_step_s=max(report.step_s for report in reports),
            expected_step_s=self._expected_step_s,
        )
        self.recoveries.append(recovery)
        held.costs = learn_costs(held.costs, proposal, phases)
        held.incidents, held.broke_at = held.incidents + 1, 0.0
        self._watch.begin()
        if dist.get_rank() == 0:
            print_line(describe_recovery(recovery))

    def watch_step(self, took_s: float) -> None:
        """Hear of a step that was made. Once enough were made after a recovery, record what a step takes."""
        mean_s = self._watch.add_step(took_s)
        if mean_s is not None:
            self.recoveries[-1] = self.recoveries[-1]._replace(took_step_s=mean_s)
            if dist.get_rank() == 0:
                print_line(describe_steps(self.recoveries[-1]))


def find_device() -> torch.device:
    """Return the device whose tensors the default group sends: the current GPU over NCCL, the host over gloo."""
    named = dist.get_backend_config() if dist.is_initialized() else ""
    backends = {part.rpartition(":")[2] for part in named.split(",")}
    if "nccl" in backends and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if "gloo" in backends:
        return HOST
    raise RuntimeError('an ElasticPipeline needs init_process_group("gloo") or init_process_group("nccl")')


def _begin_plan(held: HeldLayers, reports: Sequence[RankReport]) -> RoutePlan:
    """Return the plan of a job that starts, or that starts again from storage after the loss of all workers."""
    stored = min(report.stored for report in reports)
    sources = (STORAGE,) * held.job.layers
    plan = first_plan(held.job, len(reports))
    return msgspec.structs.replace(
        plan, halves=held.job.halves == "on", rollback=True, sources=sources, resume_step=max(0, stored) + 1
    )


def print_line(text: str) -> None:
    """Print a line about the pipeline on this rank's console."""
    print(f"holdfast: pipeline: {text}", file=sys.stderr, flush=True)
