"""A job over NCCL, or gloo without a GPU, that ends with the same bits whatever befalls it: DDP, FSDP2 or a pipeline.

Ranks may share a GPU, as in _nccl_rank.py. A snapshot of every step stays in memory. A file `strike-RANK` beside the
events has that rank raise, or its GPU stand, once. Events as in _train_ddp.py; at the end every rank adds its part to
the digest.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import TextIO

os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
WIDTH, LAYERS, BATCH, MICROBATCHES = 256, 4, 16, 4
FOR_EVER = 10**14  # cycles of the GPU


class Script:
    def __init__(self, kind: str) -> None:
        self.kind, self.rank, self.world = kind, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        with DEVICE:
            layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(LAYERS)]
        self.model: nn.Module = nn.Sequential(*layers)
        if kind == "pipeline":
            share = LAYERS // self.world
            self.model = nn.Sequential(*layers[self.rank * share : (self.rank + 1) * share])
        elif kind == "fsdp2":
            mesh = init_device_mesh(DEVICE.type, (self.world,))
            for layer in (*layers, self.model):
                fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        # By default DDP rebuilds its buckets after the first backward of each launch, and then sums in another order.
        ddp = kind == "ddp"
        self.forward = DistributedDataParallel(self.model, find_unused_parameters=True) if ddp else self.model
        if kind != "pipeline":
            holdfast.attach(self.forward)
        self.checkpointer = holdfast.Checkpointer(model=self.forward, optimizer=self.optimizer)

    def step(self, number: int) -> float:
        """Every random number of a step follows from the step and the rank."""
        torch.manual_seed(number * 100_003 + self.rank)
        loss = self._pipelined(number) if self.kind == "pipeline" else self._whole()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def _whole(self) -> float:
        inputs = torch.randn(BATCH, WIDTH, device=DEVICE)
        loss = (self.forward(inputs) - inputs.roll(1, 1)).square().mean()
        loss.backward()
        return float(loss.item())

    def _pipelined(self, number: int) -> float:
        """All forward passes, then all backward ones, microbatch by microbatch, from stage to stage."""
        first, last, total = self.rank == 0, self.rank == self.world - 1, 0.0
        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(MICROBATCHES):
            inputs = torch.randn(BATCH, WIDTH, device=DEVICE)
            if not first:
                dist.recv(inputs, self.rank - 1)
            inputs.requires_grad_()
            made.append((inputs, self.model(inputs)))
            if not last:
                dist.send(made[-1][1].detach(), self.rank + 1)
        for inputs, outputs in made:
            if last:
                loss = (outputs - 1).square().mean()
                loss.backward()
                total += loss.item()
            else:
                gradient = torch.empty_like(outputs)
                dist.recv(gradient, self.rank + 1)
                outputs.backward(gradient)
            if not first and inputs.grad is not None:
                dist.send(inputs.grad, self.rank - 1)
        return total

    def digest(self) -> str:
        """Of this rank's part of the weights and of the optimizer's state."""
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            for tensor in (parameter.detach(), *(kept for _, kept in sorted(self.optimizer.state[parameter].items()))):
                own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                found.update(str(own.flatten().double().tolist()).encode())
        return found.hexdigest()


def obey(folder: Path, rank: int) -> None:
    order = folder / f"strike-{rank}"
    if order.exists():
        kind = order.read_text()
        order.unlink()
        if kind == "raise":
            raise RuntimeError("boom")
        torch.cuda._sleep(FOR_EVER)


def note(events: TextIO, kind: str, step: int = 0) -> None:
    event = {"at": time.time(), "kind": kind, "pid": os.getpid(), "rank": dist.get_rank(), "world": 0, "step": step}
    events.write(json.dumps(event) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=Path, required=True, help="folder for the events and for strikes")
    parser.add_argument("--kind", choices=("ddp", "fsdp2", "pipeline"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--period", type=float, default=0.1, help="seconds of a step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    args.events.mkdir(parents=True, exist_ok=True)
    with (args.events / f"{os.getpid()}.jsonl").open("a", buffering=1) as events:
        script = Script(args.kind)
        for step in range(script.checkpointer.restore() + 1, args.steps + 1):
            due_at = time.monotonic() + args.period
            obey(args.events, dist.get_rank())
            holdfast.step(step, loss=script.step(step))
            script.checkpointer.save(step)
            note(events, "step", step)
            time.sleep(max(0.0, due_at - time.monotonic()))
        (args.events / f"digest-{dist.get_rank()}").write_text(script.digest())
    script.checkpointer.close()
    del script  # a DDP that outlives its group can deadlock when it is freed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
