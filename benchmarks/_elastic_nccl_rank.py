"""A job over NCCL (gloo without a GPU) whose ranks survive, and that ends with the same bits whatever befalls it.

Ranks may share a GPU, as in _nccl_rank.py. A file `strike-RANK` beside the events has that rank fail, once, in the way
it names. With --ahead nobody waits for a GPU: steps and snapshots are queued behind sums that have not ended yet.
"""

import argparse
import hashlib
import json
import os
import signal
import time
from functools import partial
from pathlib import Path

os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
WIDTH, LAYERS, BATCH = 256, 4, 16
FOR_EVER = 10**14  # cycles of the GPU


def strike(folder: Path, rank: int) -> None:
    """Fail if that was asked for; the time is in the file that stays."""
    asked = folder / f"strike-{rank}"
    if not asked.exists():
        return
    how = asked.read_text()
    (folder / "struck.part").write_text(str(time.time()))
    (folder / "struck.part").rename(folder / "struck")
    asked.unlink()
    match how:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exception":
            raise RuntimeError("boom")
        case "GPU assert":
            torch.ones(4, device=DEVICE)[torch.tensor([10**9], device=DEVICE)].sum().item()
        case "GPU stands":
            torch.cuda._sleep(FOR_EVER)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy to the device; nobody waits for it, so that a GPU may stand without its host."""
    return tensor.pin_memory().to(DEVICE, non_blocking=True) if ON_GPU else tensor


def build_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    with DEVICE:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    if kind != "fsdp2":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    for layer in (*layers, model):
        fully_shard(layer, mesh=mesh)
    return model


def rehearse(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Make one step with samples that are of no step, and say so in the folder."""
    inputs = on_device(torch.ones(BATCH, WIDTH))
    (model(inputs) - inputs.roll(1, 1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if ON_GPU:
        torch.cuda.synchronize()
    (folder / f"rehearsed-{os.environ['RANK']}-{os.getpid()}").touch()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--ckpt", type=Path)  # states are in memory alone
    parser.add_argument("--kind", default="ddp")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--gate", type=int, default=0)  # before this step ranks wait for a file `go`
    parser.add_argument("--ahead", action="store_true")
    args = parser.parse_args()
    args.events.mkdir(exist_ok=True)
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    rank, model = dist.get_rank(), holdfast.attach(build_model(args.kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @holdfast.survive(model=model, optimizer=optimizer, rehearsal=partial(rehearse, model, optimizer, args.events))
    def train(here: holdfast.Here) -> None:
        ckpt = holdfast.Checkpointer(model=model, optimizer=optimizer)
        first = ckpt.restore() + 1
        with (args.events / f"{os.getpid()}.jsonl").open("a", buffering=1) as events:
            for step in range(first, args.steps + 1):
                while step == args.gate and not (args.events / "go").exists():
                    time.sleep(0.01)
                strike(args.events, rank)
                chance = torch.Generator().manual_seed(step * 100_003 + rank)
                inputs = on_device(torch.randn(BATCH, WIDTH, generator=chance))
                loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                ckpt.save(step)
                if not args.ahead:
                    loss.item()
                holdfast.step(step)
                told = {"at": time.time(), "kind": f"step in {here.generation}", "pid": os.getpid(), "rank": rank}
                events.write(json.dumps({**told, "step": step}) + "\n")
                time.sleep(0.005)

    train()
    whole = [getattr(one, "full_tensor", lambda one=one: one)().detach().cpu() for one in model.parameters()]
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in whole)).hexdigest()
    (args.events / f"weights-{rank}").write_text(digest)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
