"""A rank of an elastic pipeline whose passes take known times without a processor, with passes whole and in halves."""

import functools
import json
import statistics
import sys
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
PART_S = 0.006  # of a layer: its pass forward, its input half, its weights half
LOST = 5  # the second stage of the second pipeline
UNTIMED = 2  # first steps; in the first one halves are compared with whole passes
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


def plan_without_lost(job: PipelineJob) -> RoutePlan:
    """Return the plan that rerouting proposes when one of all workers is lost."""
    whole = first_plan(job, STAGES * PIPELINES)
    names = {worker: worker - (worker > LOST) for worker in range(len(whole.held))} | {LOST: -1}
    routes = tuple(tuple(RouteSegment(names[s.worker], s.first, s.end) for s in route) for route in whole.routes)
    held = tuple(mine for worker, mine in enumerate(whole.held) if worker != LOST)
    earlier = RoutePlan(held=held, routes=routes)
    situation = PipelineSituation(committed=0, held=held, earlier=earlier, lost=(whole.held[LOST],))
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


def main() -> None:
    into, lost, steps, rounds = Path(sys.argv[1]), sys.argv[2] == "lost", int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if lost:
        pipeline_recovery.first_plan = lambda job, workers: plan_without_lost(job)  # type: ignore[attr-defined]
    found = [(way, *time_steps(way, steps)) for _ in range(rounds) for way in WAYS]
    if dist.get_rank() == 0:
        into.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
