"""A script that starts its own ranks by torch.multiprocessing.spawn, as many did before there was a launcher."""

import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, SAVE_EVERY, PATH = 60, 10, "spawned.pt"


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def train(rank, world_size):
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = 0
    if os.path.exists(PATH):
        saved = torch.load(PATH)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    ddp_model = DDP(model)
    for step in range(first, STEPS):
        time.sleep(0.5 if os.path.exists("busy") else 0.05)  # as storage that others use, too
        inputs = torch.randn(8, 10, generator=torch.Generator().manual_seed(2 * step + rank))
        optimizer.zero_grad()
        loss = ddp_model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1}/{STEPS} loss {loss.item():.6f}", flush=True)
        if rank == 0 and (step + 1) % SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, PATH + ".new")
            os.replace(PATH + ".new", PATH)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    mp.spawn(train, args=(2,), nprocs=2, join=True)
