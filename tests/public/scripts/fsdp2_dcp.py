"""FSDP2 with torch's distributed checkpoints, as in PyTorch's recipe for the two."""

import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CHECKPOINTS, STEPS, SAVE_EVERY = "checkpoints", 60, 10


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def newest():
    """A checkpoint is whole when its metadata are there."""
    names = os.listdir(CHECKPOINTS) if os.path.isdir(CHECKPOINTS) else []
    whole = [int(name) for name in names if os.path.exists(f"{CHECKPOINTS}/{name}/.metadata")]
    return max(whole, default=0)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = newest()
    if first:
        dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=f"{CHECKPOINTS}/{first}")
    for step in range(first + 1, STEPS + 1):
        time.sleep(0.5 if os.path.exists("busy") else 0.05)  # as storage that others use, too
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}")
        if step % SAVE_EVERY == 0:
            dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=f"{CHECKPOINTS}/{step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
