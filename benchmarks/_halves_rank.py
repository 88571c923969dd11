"""A rank of an elastic pipeline whose passes take known times without a processor, with passes whole and in halves."""

import functools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.client.elastic import pipeline_recovery
from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.plan_choice import POLICIES, choose_plan
from holdfast.core.elastic.proposal import PhaseCosts
from holdfast.model.pipeline_routes import PipelineJob, PipelineSituation, RoutePlan, RouteSegment

STAGES, PIPELINES, LAYERS, MICROBATCHES = 4, 2, 8, 16
PART_S = 0.02  # of a layer: its pass forward, its input half, its weights half
LOST = 5  # the second stage of the second pipeline
UNTIMED = 1  # first step, in which halves are compared with whole passes
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"halves": "off"},
    "halves": {"halves": "on"},
    "whole, early": {"halves": "off", "early_step": True},
    "halves, early": {"halves": "on", "early_step": True},
}


class Waiting(torch.autograd.Function):
    """Takes its time on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(PART_S)
        return gradient


class Timed(nn.Module):
    """A small layer, each part of whose passes takes the same time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(PART_S)
        made = nn.functional.linear(x, Waiting.apply(self.linear.weight), self.linear.bias)  # type: ignore[no-untyped-call]
        found: torch.Tensor = Waiting.apply(x + nn.functional.gelu(made))  # type: ignore[no-untyped-call]
        return found


def plan_without(job: PipelineJob, lost: int) -> RoutePlan:
    """Return the plan that rerouting proposes when this one of all workers is lost."""
    whole = first_plan(job, STAGES * PIPELINES)
    names = {worker: worker - (worker > lost) for worker in range(len(whole.held))} | {lost: -1}
    routes = tuple(tuple(RouteSegment(names[s.worker], s.first, s.end) for s in route) for route in whole.routes)
    held = tuple(mine for worker, mine in enumerate(whole.held) if worker != lost)
    earlier = RoutePlan(held=held, routes=routes)
    situation = PipelineSituation(committed=0, held=held, earlier=earlier, lost=(whole.held[lost],))
    chosen = choose_plan(job, situation, PhaseCosts(), {"reroute": POLICIES["reroute"]}).chosen
    assert chosen is not None
    return chosen.plan


def batch(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1000 * step + microbatch))
    return x, x.flip(1)


def time_steps(way: str, steps: int) -> tuple[float, str]:
    """Return the median time of a step, and the digest of the state that it comes to."""
    pipeline = holdfast.ElasticPipeline(
        [functools.partial(Timed, 8)] * LAYERS,
        functools.partial(torch.optim.AdamW, lr=1e-2),
        nn.functional.mse_loss,
        microbatches=MICROBATCHES,
        stages=STAGES,
        snapshot_every=0,
        **WAYS[way],
    )
    took = []
    for _ in pipeline.steps(UNTIMED + steps):
        since = time.perf_counter()
        pipeline.step(batch)
        took.append(time.perf_counter() - since)
    return statistics.median(took[UNTIMED:]), pipeline.digest()


def train_rank(into: Path, place: dict[str, str], steps: int, rounds: int) -> None:
    """Train as one rank, in each way in turns; the first rank writes what steps took and states came to."""
    os.environ.update(place)
    dist.init_process_group("gloo")
    if dist.get_world_size() < STAGES * PIPELINES:
        pipeline_recovery.first_plan = lambda job, workers: plan_without(job, LOST)  # type: ignore[attr-defined]
    found = [(way, *time_steps(way, steps)) for _ in range(rounds) for way in WAYS]
    if dist.get_rank() == 0:
        into.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
