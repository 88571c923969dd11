"""One step of a pipeline by a spare rank alone. It loads what a first step needs, and leaves nothing."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from holdfast.client.elastic.layer_state import LayerUnit, keep_chance
from holdfast.client.elastic.routed_passes import BatchOf, LossOf
from holdfast.model.pipeline_routes import PipelineJob


def rehearse_step(job: PipelineJob, make_unit: Callable[[int], LayerUnit], loss: LossOf, batch: BatchOf) -> None:
    """Take one microbatch through the whole model, with one layer in memory at a time. Each layer goes forward and
    backward, and makes its optimizer's step."""
    device = make_unit(0).device
    with keep_chance(device):
        given, target = batch(1, 0)
        given = given.to(device)
        for layer in range(job.layers):
            unit = make_unit(layer)
            if given.is_floating_point():
                given = given.detach().requires_grad_(layer > 0)
            made = unit.module(given).contiguous()
            if made.requires_grad:
                torch.autograd.backward(made, torch.zeros_like(made))
            if unit.parameters:
                unit.gradient = unit.take_gradients()
            unit.apply(1, None, None)
            unit.unpack(unit.pack())
            given = made
        leaf = given.detach().requires_grad_()
        loss(leaf, target.to(device) if isinstance(target, torch.Tensor) else target).backward()
        dist.all_reduce(torch.zeros(1, dtype=torch.float64, device=device))
