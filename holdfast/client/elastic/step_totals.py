"""The last exchange of a step: it gives every worker each microbatch's loss and each layer's squared gradient norm.

This exchange is also the step's vote: a worker takes part only when it has all of its summed gradients.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from holdfast.client.elastic.layer_state import LayerUnit
from holdfast.model.pipeline_routes import PipelineJob, RoutePlan


def exchange_totals(
    job: PipelineJob,
    plan: RoutePlan,
    units: Mapping[int, LayerUnit],
    losses: Mapping[int, float],
    *,
    norms: bool,
    asked: bool = False,
) -> tuple[tuple[float, ...], bool]:
    """Return the losses by microbatch, followed by the squared norm of each layer's summed gradient (zeros without
    `norms`). For each number, one worker gives its value and the others give 0, so their sum is exact. Also return
    whether any worker is `asked` to hand over its layers after this step: all learn it at the same step."""
    told = torch.zeros(job.microbatches + job.layers + 1, dtype=torch.float64)
    told[-1] = float(asked)
    for m, loss in losses.items():
        told[m] = loss
    if norms:
        rank = dist.get_rank()
        for layer, unit in units.items():
            if first_holder(plan, layer) == rank:
                told[job.microbatches + layer] = unit.sum_squares()
    dist.all_reduce(told)
    *totals, askers = told.tolist()
    return tuple(totals), askers > 0


def first_holder(plan: RoutePlan, layer: int) -> int:
    return next(worker for worker, held in enumerate(plan.held) if layer in held)


def mean_loss(job: PipelineJob, totals: tuple[float, ...]) -> float:
    return sum(totals[: job.microbatches]) / job.microbatches


def clip_scale(job: PipelineJob, totals: tuple[float, ...], most: float | None) -> float | None:
    """Return the factor that scales the gradient's norm down to `most`; None if the gradient needs no scaling."""
    if most is None:
        return None
    norm = math.sqrt(sum(totals[job.microbatches :]))
    return most / (norm + 1e-6) if norm > most else None
