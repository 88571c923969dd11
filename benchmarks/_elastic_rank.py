"""A small DDP job whose ranks survive; each writes down when it made which step, in which generation."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

STEP_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--ckpt", type=Path)  # states are in memory alone
    args = parser.parse_args()
    args.events.mkdir(exist_ok=True)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ddp = holdfast.attach(DistributedDataParallel(nn.Linear(256, 256)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

    @holdfast.survive(model=ddp)
    def train(here: holdfast.Here) -> None:
        ckpt = holdfast.Checkpointer(model=ddp, optimizer=optimizer)
        step = ckpt.restore()
        with (args.events / f"{os.getpid()}.jsonl").open("a", buffering=1) as events:
            while True:
                step += 1
                loss = ddp(torch.randn(8, 256)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ckpt.save(step)
                holdfast.step(step, loss=loss.detach())
                told = {"at": time.time(), "kind": f"step in {here.generation}", "pid": os.getpid(), "rank": rank}
                events.write(json.dumps(told) + "\n")
                time.sleep(STEP_S)

    train()


if __name__ == "__main__":
    main()
