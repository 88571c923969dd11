"""One rank of a job that saves and restores; run as a script: how it is wrapped, the last step, and what befalls it."""

import argparse
import hashlib
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.checkpoint import memory_copy

FEATURES, BATCH = 12, 4


def made(how: str, seed: int, wide: int = 36) -> nn.Module:
    """A model on its ranks; all start with the same weights."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, wide), nn.Tanh(), nn.Linear(wide, FEATURES), nn.Linear(FEATURES, 7))
    model.register_buffer("seen", torch.zeros(2))
    world = dist.get_world_size()
    if how == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if how == "tp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    if how in ("fsdp", "hsdp"):
        shape = (world,) if how == "fsdp" else (2, world // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])
        for layer in (model[0], model[2], model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        own = optimizer.state[parameter]
        for tensor in (parameter, *(own[name] for name in sorted(own))):
            found.update(whole(tensor.detach()).contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def die_while_copying(after: int) -> None:
    """The rank is killed in the middle of the copies of a snapshot."""
    run = memory_copy.MemoryCopier.copy_moves

    def some(self: memory_copy.MemoryCopier, moves: object) -> None:
        run(self, list(moves)[:after])  # type: ignore[call-overload]
        os.kill(os.getpid(), signal.SIGKILL)

    memory_copy.MemoryCopier.copy_moves = some  # type: ignore[method-assign]


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("how")
    asked.add_argument("last", type=int)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--wide", type=int, default=36)
    asked.add_argument("--path")
    asked.add_argument("--kill", default="")  # rank:step:when
    told = asked.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = made(told.how, told.seed, told.wide)
    seen = next(model.buffers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    asked_for = {"path": told.path, "every": 2} if told.path else {}
    ckpt = holdfast.Checkpointer(model=model, optimizer=optimizer, extra={"schedule": schedule}, **asked_for)
    start = ckpt.restore()
    if start == 0:
        torch.manual_seed(rank)
    killed = told.kill.split(":") if told.kill else ["-1", "-1", ""]
    for step in range(start + 1, told.last + 1):
        x = torch.randn(BATCH, FEATURES)  # of each rank's own generator
        if told.how == "tp":
            dist.broadcast(x, 0)
        if told.how == "plain":
            dist.barrier()  # steps of a job go together
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        seen += rank + 1
        mine = [str(rank), str(step)] == killed[:2]
        if mine and killed[2] == "during":
            die_while_copying(3)
        if mine and killed[2] == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        ckpt.save(step)
        if [str(step), "after"] == killed[1:]:
            dist.barrier()  # or the others might hear of the death within this step, and not get to save it
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
        ckpt.wait()
    rest = schedule.get_last_lr(), seen.tolist(), torch.rand(1).item()
    print(start, ckpt.restored_from, digest(model, optimizer), *rest, flush=True)
    os._exit(0)  # how a rank ends is not asked here, and to take all of torch apart costs more than the steps


if __name__ == "__main__":
    main()
