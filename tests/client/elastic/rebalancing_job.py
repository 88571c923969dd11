"""One worker of a pipeline, one of whose workers becomes slow after some steps; run as a script. Nobody fails."""

import functools
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import holdfast

SLOW_AFTER, STEPS = 8, 48
USUAL_S, SLOW_S = 0.003, 0.03  # of a layer
slow_rank, asked = sys.argv[1], json.loads(sys.argv[2])
now = {"step": 0}


class Timed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_slow = os.environ["RANK"] == slow_rank and now["step"] > SLOW_AFTER
        time.sleep(SLOW_S if is_slow else USUAL_S)
        found: torch.Tensor = x + self.dropout(nn.functional.gelu(self.linear(x)))
        return found


def batch(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1000 * step + microbatch))
    return x, x.flip(1)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pipeline = holdfast.ElasticPipeline(
        [functools.partial(Timed, 8)] * 4,
        functools.partial(torch.optim.AdamW, lr=0.01),
        nn.functional.mse_loss,
        microbatches=8,
        stages=2,
        clip_norm=1.0,
        **asked,
    )
    losses = []
    for step in pipeline.steps(STEPS):
        now["step"] = step
        losses.append(pipeline.step(batch))
    moves = [move._asdict() for move in pipeline.moves]
    held = sorted(pipeline.layers)
    print(json.dumps([moves, held, losses, pipeline.digest(), len(pipeline.recoveries)]), flush=True)
    dist.barrier()
    os._exit(0)


main()
