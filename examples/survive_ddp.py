"""Ranks that survive: when one dies, the others go on in their processes.

holdfast run --nnodes 2 --nproc-per-node 2 examples/survive_ddp.py

Kill a rank while it trains (`holdfast status` shows the run directory, `ps` the ranks): the others keep their pids, and
the last line is the same as without the kill.
"""

import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

STEPS = int(os.environ.get("STEPS", "200"))

dist.init_process_group("gloo")
torch.manual_seed(0)
model = holdfast.attach(DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))))
optimizer = torch.optim.AdamW(model.parameters())


@holdfast.survive(model=model, optimizer=optimizer)
def train(here: holdfast.Here) -> None:
    checkpointer = holdfast.Checkpointer(model=model, optimizer=optimizer)
    for step in range(checkpointer.restore() + 1, STEPS + 1):
        torch.manual_seed(step * 1000 + here.rank)  # what a step draws follows from the step and the rank
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.save(step)
        holdfast.step(step, loss=loss)
        time.sleep(0.05)  # so that somebody can look


train()
if dist.get_rank() == 0:
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"process {os.getpid()} ends with weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
dist.destroy_process_group()
