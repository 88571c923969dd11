"""One worker of a pipeline without failures; run as a script: the stages, and what else the pipeline is asked."""

import functools
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import holdfast

STEPS = 3


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)
        if "moving" in sys.argv:
            self.calls: torch.Tensor
            self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "moving" in sys.argv:
            self.calls += 1
        found: torch.Tensor = x + self.dropout(nn.functional.gelu(self.linear(x)).transpose(0, 1)).transpose(0, 1)
        return found


def batch(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(3 + microbatch, 8, generator=torch.Generator().manual_seed(1000 * step + microbatch))
    return x, x.flip(1)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pipeline = holdfast.ElasticPipeline(
        [nn.Identity, *[functools.partial(Residual, 8)] * 5],
        functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9),
        nn.functional.mse_loss,
        microbatches=5,
        clip_norm=0.1,
        rate=lambda step: 0.5 / step,
        snapshot_every=2,
        **json.loads(sys.argv[1]),
    )
    torch.manual_seed(dist.get_rank())
    before = torch.get_rng_state()
    losses = [pipeline.step(batch) for _ in pipeline.steps(STEPS)]
    assert torch.equal(torch.get_rng_state(), before)
    print(json.dumps([losses, pipeline.digest(), sorted(pipeline.layers)]), flush=True)
    dist.barrier()
    os._exit(0)


main()
