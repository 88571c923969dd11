"""A pipeline that goes on when a rank dies, with the state in its processes and without a checkpoint.

holdfast run --nnodes 2 --nproc-per-node 2 examples/elastic_pipeline.py

Kill a rank while it trains: a line of rank 0 says what was done, the other ranks keep their pids, and the last line is
the same as without the kill. With --nnodes 4 --nproc-per-node 1 --min-nodes 3 it goes on without a lost node, too.
BACKEND=nccl takes a GPU for each rank.
"""

import functools
import os
import time

import torch
import torch.distributed as dist
from torch import nn

import holdfast

STEPS, BACKEND = int(os.environ.get("STEPS", "200")), os.environ.get("BACKEND", "gloo")
WIDTH, MICROBATCHES = 64, 8


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.dropout(nn.functional.gelu(self.linear(x)))
        return found


def batch(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a microbatch has follows from its numbers, not from the rank that computes it."""
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step * MICROBATCHES + microbatch))
    return x, x.flip(1)


if BACKEND == "nccl":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(BACKEND)
pipeline = holdfast.ElasticPipeline(
    layers=[functools.partial(Residual, WIDTH)] * 8,
    optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
    loss=nn.functional.mse_loss,
    microbatches=MICROBATCHES,
    stages=2,
    clip_norm=1.0,
    snapshot_every=5,
)


@holdfast.survive(pipeline=pipeline)
def train(here: holdfast.Here) -> None:
    for step in pipeline.steps(STEPS):
        loss = pipeline.step(batch)
        holdfast.step(step, loss=loss)
        time.sleep(0.05)  # so that somebody can look


train()
digest = pipeline.digest()
if dist.get_rank() == 0:
    print(f"process {os.getpid()} ends with state {digest[:16]}", flush=True)
dist.destroy_process_group()
