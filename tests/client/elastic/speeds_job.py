"""One worker of a pipeline, one of whose workers is slow; run as a script. After some steps all meet again, as they do
after a failure, and choose a plan from what they have measured."""

import functools
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import holdfast

STEPS, MORE = 10, 8
USUAL_S, SLOW_S = 0.003, 0.012  # of a layer


class Timed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLOW_S if os.environ["RANK"] == sys.argv[1] else USUAL_S)
        found: torch.Tensor = x + nn.functional.gelu(self.linear(x))
        return found


def batch(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1000 * step + microbatch))
    return x, x.flip(1)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pipeline = holdfast.ElasticPipeline(
        [functools.partial(Timed, 8)] * 4,
        functools.partial(torch.optim.SGD, lr=0.1),
        nn.functional.mse_loss,
        microbatches=8,
        stages=2,
        snapshot_every=0,
    )
    for total in (STEPS, STEPS + MORE):
        for _ in pipeline.steps(total):
            pipeline.step(batch)
    shares = [0] * dist.get_world_size()
    for route in pipeline._held.plan.routes:
        for segment in route:
            shares[segment.worker] += segment.end - segment.first
    [recovery] = pipeline.recoveries
    told = (recovery.before_step_s, recovery.expected_step_s, recovery.took_step_s)
    print(json.dumps([shares, told, recovery.phases, pipeline.digest()]), flush=True)
    dist.barrier()
    os._exit(0)


main()
