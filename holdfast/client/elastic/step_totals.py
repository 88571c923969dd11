"""The last exchange of a step: it gives every worker each microbatch's loss and each layer's squared gradient norm.

This exchange is also the step's vote: a worker takes part only when it has all of its summed gradients. Over NCCL an
abort ends the exchange early, and nothing says so. So every worker also gives a one, whose sum shows who took part, and
what came counts only if no abort had begun when it was there.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from holdfast.client.elastic.layer_state import LayerUnit
from holdfast.client.elastic.rank_traffic import GroupsBrokenError, require_open
from holdfast.client.snapshot.seal_fence import SealPass
from holdfast.model.pipeline_routes import PipelineJob, RoutePlan


def list_totals(
    job: PipelineJob,
    plan: RoutePlan,
    units: Mapping[int, LayerUnit],
    losses: Mapping[int, torch.Tensor],
    *,
    norms: bool,
) -> list[torch.Tensor | float]:
    """Return this worker's part in the totals: the losses by microbatch, followed by the squared norm of each layer's
    summed gradient (zeros without `norms`). For each number, one worker gives its value and the others give 0, so their
    sum is exact."""
    told: list[torch.Tensor | float] = [losses.get(m, 0.0) for m in range(job.microbatches)]
    rank = dist.get_rank()
    for layer in range(job.layers):
        gives = norms and layer in units and first_holder(plan, layer) == rank
        told.append(units[layer].sum_squares() if gives else 0.0)
    return told


def exchange_totals(
    mine: Sequence[torch.Tensor | float], device: torch.device, seal: SealPass, *, asked: bool = False
) -> tuple[tuple[float, ...], bool]:
    """Return the sums of these numbers over all workers, and whether any worker is `asked` to hand over its layers
    after this step: all learn it at the same step. Raise GroupsBrokenError if a worker did not take part, or if the
    groups may have been aborted before the sums were there."""
    world = dist.get_world_size()
    told = torch.zeros(len(mine) + 2, dtype=torch.float64, device=device)
    for place, number in enumerate(mine):
        if isinstance(number, torch.Tensor) or number:
            told[place] = number
    told[-2], told[-1] = 1.0, float(asked)
    dist.all_reduce(told)
    *totals, took_part, askers = told.tolist()  # waits for the GPU
    if took_part != world:
        raise GroupsBrokenError(f"the step's last exchange ended early, with {took_part:g} of {world} workers")
    require_open(seal)
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
