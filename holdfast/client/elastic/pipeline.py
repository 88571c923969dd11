"""A pipeline that goes on when workers fail or join: its layers, its steps, and its console lines."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from holdfast.client.elastic.agent_hand_over_request import HAND_OVER
from holdfast.client.elastic.finished_passes import FinishedPasses
from holdfast.client.elastic.gradient_sums import GradientSums, Reduction
from holdfast.client.elastic.held_layers import HeldLayers
from holdfast.client.elastic.layer_state import HOST, MakeLayer, MakeOptimizer, keep_chance
from holdfast.client.elastic.pass_messages import PassMessages
from holdfast.client.elastic.pipeline_recovery import PipelineRecovery, find_device, print_line
from holdfast.client.elastic.rank_traffic import require_open
from holdfast.client.elastic.recovery_account import Recovery
from holdfast.client.elastic.rehearsed_step import rehearse_step
from holdfast.client.elastic.routed_passes import (
    BatchOf,
    LossOf,
    PassSettings,
    RoutedPasses,
)
from holdfast.client.elastic.state_moves import digest_states
from holdfast.client.elastic.step_phase_times import PASSES, StepPhases
from holdfast.client.elastic.step_totals import (
    clip_scale,
    exchange_totals,
    first_holder,
    list_totals,
    mean_loss,
)
from holdfast.client.elastic.work_rebalancing import WorkMove, WorkRebalancing
from holdfast.client.snapshot.seal_fence import SEAL_FENCE
from holdfast.core.elastic.plan_choice import POLICIES
from holdfast.core.elastic.rebalanced_plans import REBALANCE
from holdfast.core.elastic.task_order import order_messages, order_tasks
from holdfast.model.pipeline_routes import PipelineJob, Semantics

_FLOORS = {
    "exact": Semantics.EXACT,
    "fp_order": Semantics.FP_ORDER,
    "batch_changed": Semantics.BATCH_CHANGED,
}

_FOLLOWED = (*POLICIES, REBALANCE)
_LEAVES_S, _LOOK_S = 10.0, 0.02  # how long ranks that have handed over wait to be told to leave


class StepSettings(NamedTuple):
    """The settings of a pipeline that apply to every step."""

    passes: PassSettings
    reduction: Reduction
    clip_norm: float | None
    rate: Callable[[int], float] | None
    snapshot_every: int
    store_every: int
    early_step: bool


class ElasticPipeline:
    """A model in layers that the job's ranks hold and compute in turns, by a plan that changes when ranks change.

    Ranks that survive a failure keep their layers. They agree on the last step, choose a new plan and go on, without a
    Checkpointer. What a step computes depends on its number, its microbatches and its layers, but on no rank.

    >>> layers = [lambda: torch.nn.Linear(4, 4)] * 6
    >>> pipeline = holdfast.ElasticPipeline(layers, torch.optim.AdamW, torch.nn.functional.mse_loss, microbatches=4)
    >>> pipeline.job.layers
    6
    """

    def __init__(
        self,
        layers: Sequence[MakeLayer],
        optimizer: MakeOptimizer,
        loss: LossOf,
        *,
        microbatches: int,
        stages: int = 1,
        semantics: Literal["exact", "fp_order", "batch_changed"] = "exact",
        reduction: Reduction = "ordered",
        seed: int = 0,
        recompute: bool = False,
        clip_norm: float | None = None,
        rate: Callable[[int], float] | None = None,
        snapshot_every: int = 10,
        path: str | Path | None = None,
        store_every: int = 0,
        shadows: bool = False,
        capacity: int = 0,
        halves: Literal["auto", "on", "off"] = "auto",
        early_step: bool = False,
        policies: Sequence[str] = _FOLLOWED,
    ) -> None:
        """`layers` are functions that make one layer each. A worker calls those for the layers that it holds, with
        random numbers drawn from `seed`. `optimizer` gets a layer's parameters. `loss` gets the last layer's output for
        one microbatch, and the target from `batch`. `stages` is the number of ranks of one whole pipeline; if there are
        more ranks, they form replicas of this pipeline. `rate` gives the learning rate of a step. Snapshots go to
        another rank's memory every `snapshot_every` steps (0: never), and layers to files under `path` every
        `store_every` steps. With `shadows` each rank also keeps the layers of the ranks that it sends to. `capacity`
        is how many layers a rank has memory for (0: all). `halves` says when backward passes are made in two halves:
        "on", "off", or "auto": while ranks do the work of lost ones and halves make that faster. With `early_step` a
        rank makes its optimizers' step before all are known to be that far, and takes it back if need be."""
        _check_arguments(layers, semantics, reduction, policies, store_every > 0 and path is None)
        _check_halves(halves)
        self.job = PipelineJob(
            layers=len(layers),
            microbatches=microbatches,
            stages=min(stages, len(layers)),
            floor=_FLOORS[semantics],
            ordered=reduction == "ordered",
            capacity=capacity,
            seed=seed,
            halves=halves,
        )
        passes = PassSettings(loss, microbatches, len(layers), seed, recompute)
        self._settings = StepSettings(passes, reduction, clip_norm, rate, snapshot_every, store_every, early_step)
        self._held = HeldLayers(self.job, list(layers), optimizer, path, shadows=shadows)
        self._phases, self._asked = StepPhases(), False  # in the newest vote, to hand over
        self._recovery = PipelineRecovery(self._held, self._phases, self._apply, tuple(policies))
        self._rebalancing = WorkRebalancing(self._held, self._recovery, named=REBALANCE in policies)

    @property
    def layers(self) -> dict[int, torch.nn.Module]:
        """Return the layers that this rank holds, by number."""
        return {number: unit.module for number, unit in sorted(self._held.units.items())}

    @property
    def recoveries(self) -> list[Recovery]:
        """Return the recoveries from all failures that this process has seen, in order."""
        return list(self._recovery.recoveries)

    @property
    def moves(self) -> list[WorkMove]:
        """Return all moves of work between workers that did not fail, in order, as this process has seen them."""
        return list(self._rebalancing.moves)

    def steps(self, total: int) -> Iterator[int]:
        """Meet the other ranks, bring all layers to one step, and yield each later step up to `total`. Call `step` once
        for each. All ranks call this together, at the beginning of the function that survives."""
        self._recovery.meet()
        self._rebalancing.forget()
        self._prepare()
        HAND_OVER.serving, HAND_OVER.saves = True, self._held.files.is_there
        while (step := self._held.committed + 1) <= total:
            if self._recovery.change_plan() or self._rebalancing.look(total):
                self._prepare()
            yield step
            if self._held.committed != step:
                raise RuntimeError(f"step {step} was not made: call step() once for each number that steps() yields")
            if self._asked:
                self._hand_over()
        HAND_OVER.serving = False

    def _hand_over(self) -> None:
        """Hand over what leaving ranks hold, and wait to be told to leave this generation, which ends this function."""
        self._asked = False
        self._recovery.hand_over(HAND_OVER.leaving)
        HAND_OVER.finish()
        until = time.monotonic() + _LEAVES_S
        while time.monotonic() < until:  # if nobody tells us, the next step fails or is made
            time.sleep(_LOOK_S)

    def _prepare(self) -> None:
        """Prepare what all steps of a plan share: the order of the passes and messages, and the gradient sums. The
        first step after a failure is without the passes that were finished before."""
        plan, reused = self._held.plan, self._held.reused
        due = tuple(() if m in reused else route for m, route in enumerate(plan.routes))
        self._tasks, self._messages = order_tasks(due, halves=plan.halves), order_messages(due, halves=plan.halves)
        made = msgspec.structs.replace(plan, routes=tuple(reused.get(m, route) for m, route in enumerate(plan.routes)))
        self._sums = GradientSums(made, dist.get_rank(), self._settings.reduction, self.job.layers)

    def step(self, batch: BatchOf) -> float:
        """Make the next step and return its loss: the mean over its microbatches, the same on all ranks.

        `batch(step, microbatch)` returns two things: the input of the first layer, and what the loss takes beside the
        last layer's output. It must return the same on every rank.
        """
        step, self._held.finished = self._held.committed + 1, 0
        try:
            with keep_chance(self._held.device):
                totals = self._make_step(step, batch)
        finally:
            self._held.broke_at = 0.0 if self._held.finished == step else time.time()
        return mean_loss(self.job, totals)

    def rehearse(self, batch: BatchOf) -> None:
        """Make a step of all layers in this process alone, and discard it. Name it as the rehearsal of a spare rank:
        survive(pipeline=pipeline, rehearsal=functools.partial(pipeline.rehearse, batch))."""
        self._held.renew_traffic(find_device())
        rehearse_step(self.job, self._held.make_unit, self._settings.passes.loss, batch)

    def digest(self) -> str:
        """Return a hash of all layers with their optimizers' states, the same on all ranks. All ranks call it."""
        return digest_states(self._held.units)

    def _make_step(self, step: int, batch: BatchOf) -> tuple[float, ...]:
        held, phases, settings = self._held, self._phases, self._settings
        held.handed = {}  # if others were handed over to and nobody left, they grow old now
        phases.begin()
        phases.enter(PASSES)
        traffic, rank, seal = held.traffic, dist.get_rank(), SEAL_FENCE.make_pass()
        messages = PassMessages(self._messages, rank, traffic)
        held.made = made = held.made if held.reused else FinishedPasses(step)
        halves = held.halves if held.plan.halves else None
        passes = RoutedPasses(settings.passes, held.units, messages, held.times, made, halves=halves)
        buffers = held.buffer_versions()
        passes.run(held.plan, self._tasks, rank, step, batch)
        if held.buffer_versions() != buffers:
            raise RuntimeError("a layer changed a buffer in its forward pass, which replicas would not do alike")
        for line in held.halves.describe_refused([n for n in held.units if first_holder(held.plan, n) == rank]):
            print_line(line)
        phases.enter("sums")
        self._sums.sum_gradients(held.units, made.gradients, traffic)
        traffic.await_device()
        require_open(seal)
        held.ready = step
        if settings.early_step:
            phases.enter("early")
            held.early.make(step, held.units, self._rate_of(step))
        phases.enter("vote")
        norms = settings.clip_norm is not None
        mine = list_totals(self.job, held.plan, held.units, made.losses, norms=norms)
        asked = HAND_OVER.leaving is not None
        totals, self._asked = exchange_totals(mine, held.device, seal, asked=asked)
        held.vote = (step, totals)
        held.made = FinishedPasses()
        phases.enter("apply")
        self._apply(step, totals)
        phases.enter("keep")
        self._keep_state(step)
        phases.end_step()
        if held.device == HOST:  # on a GPU the clock would tell when work was queued
            held.times.end_step()
        held.finished = step
        if held.reused:
            held.reused = {}
            self._prepare()
        for watching in (self._recovery, self._rebalancing):
            watching.watch_step(sum(phases.took_s.values()))
        return totals

    def _apply(self, step: int, totals: tuple[float, ...]) -> None:
        """Make the optimizer's step in all layers that have not made it yet."""
        scale = clip_scale(self.job, totals, self._settings.clip_norm)
        rate = self._rate_of(step)
        self._held.early.settle(step, self._held.units, stands=scale is None)
        for unit in self._held.units.values():
            unit.apply(step, scale, rate)
        self._held.committed = step

    def _rate_of(self, step: int) -> float | None:
        return self._settings.rate(step) if self._settings.rate else None

    def _keep_state(self, step: int) -> None:
        held, settings = self._held, self._settings
        if settings.snapshot_every and step % settings.snapshot_every == 0:
            held.snapshots.take(step, held.units, held.traffic, reach=held.reach, layers=self.job.layers)
        if settings.store_every and step % settings.store_every == 0:
            held.store_layers()


def _check_halves(halves: str) -> None:
    if halves not in ("auto", "on", "off"):
        raise ValueError(f'halves must be "auto", "on" or "off", not {halves!r}')


def _check_arguments(
    layers: Sequence[object],
    semantics: str,
    reduction: str,
    policies: Sequence[str],
    pathless: bool,
) -> None:
    if not layers or not all(callable(one) and not isinstance(one, torch.nn.Module) for one in layers):
        raise TypeError("layers must be functions that each make a layer, such as functools.partial(nn.Linear, 8, 8)")
    if semantics not in _FLOORS:
        raise ValueError(f"semantics must be one of {', '.join(_FLOORS)}, not {semantics!r}")
    if reduction not in ("ordered", "float"):
        raise ValueError(f'reduction must be "ordered" or "float", not {reduction!r}')
    if strange := [name for name in policies if name not in _FOLLOWED]:
        raise ValueError(f"{strange[0]!r} is no policy; these are: {', '.join(_FOLLOWED)}")
    if pathless:
        raise ValueError("store_every needs a path")
