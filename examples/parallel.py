"""A small job, trained with DDP, FSDP2, or in a pipeline of two stages with replicas, on gloo.

    holdfast run --nnodes 4 examples/parallel.py FOLDER --how fsdp

Each rank leaves `trace-RANK.jsonl` in FOLDER: after every step a digest of its whole state and the samples it was made
of, so that every step of a disturbed run can be held against an undisturbed one. A file `finish` in FOLDER ends it.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast

WIDTH, BATCH, STAGES, SAMPLES = 32, 4, 2, 1 << 16


def layers() -> nn.ModuleDict:
    """Two halves, so that a pipeline may have one each."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
    second = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    return nn.ModuleDict({"first": first, "second": second})


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = layers()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts["second"](self.parts["first"](x))
        return out


class Sampler:
    """Every sample once in an epoch, in an order of its own; where it stands is part of the state."""

    def __init__(self, part: int, parts: int) -> None:
        self._part, self._parts, self._at = part, parts, 0
        self._order = list(range(SAMPLES))
        random.Random(1).shuffle(self._order)

    def draw(self) -> list[int]:
        first = (self._at * self._parts + self._part) * BATCH
        self._at += 1
        return [self._order[(first + one) % SAMPLES] for one in range(BATCH)]

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


def content(samples: list[int]) -> Tensor:
    seeds = torch.tensor(samples, dtype=torch.float32)[:, None]
    return torch.sin(seeds * 0.37 + torch.arange(WIDTH) * 1.7)


def loss_of(out: Tensor, wanted: Tensor) -> Tensor:
    return (out - wanted).square().mean()


class Plain:
    """All layers on every rank: replicated (ddp) or sharded (fsdp)."""

    def __init__(self, how: str) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.sampler = Sampler(rank, world)
        self.replicas: Any = None
        model: nn.Module = Whole()
        if how == "fsdp":
            mesh = init_device_mesh("cpu", (world,))
            for part in model.parts.values():  # type: ignore[operator]
                fully_shard(part, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            model = holdfast.attach(DistributedDataParallel(model))
        self.model = model

    def passed(self, samples: list[int]) -> float:
        x = content(samples)
        loss = loss_of(self.model(x), x.roll(1, 1))
        loss.backward()
        return loss.item()


class Pipeline:
    """Half of the layers on each stage; stages have replicas, which all draw the samples of their column."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (STAGES, dist.get_world_size() // STAGES), mesh_dim_names=("pp", "dp"))
        holdfast.attach(mesh=mesh)
        self.stage = mesh.get_local_rank("pp")
        self.replicas = mesh.get_group("dp")
        self.sampler = Sampler(mesh.get_local_rank("dp"), mesh.size(1))
        name = ("first", "second")[self.stage]
        self.model = nn.ModuleDict({name: layers()[name]})
        group = mesh.get_group("pp")
        stage = PipelineStage(self.model[name], self.stage, STAGES, torch.device("cpu"), group=group)
        self._schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of)

    def passed(self, samples: list[int]) -> float:
        x = content(samples)
        losses: list[Tensor] = []
        if self.stage == 0:
            self._schedule.step(x)
        else:
            self._schedule.step(target=x.roll(1, 1), losses=losses)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self.replicas)
            parameter.grad /= dist.get_world_size(self.replicas)
        told = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(told)  # so that every rank can tell of it, the first stage too
        return told.item() / dist.get_world_size(self.replicas)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all that this rank holds, its random numbers too."""
    found = xxhash.xxh3_128()
    for parameter in model.parameters():
        own = optimizer.state[parameter]
        for tensor in (parameter.detach(), *(own[name] for name in sorted(own))):
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found.update(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    found.update(torch.get_rng_state().numpy().tobytes())
    return found.hexdigest()


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--how", choices=("ddp", "fsdp", "pp"), default="ddp")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--pause-s", type=float, default=0.0, help="sleep in each step")
    parser.add_argument("--stretch-s", type=float, default=0.0, help="sleep in each save and restore")
    parser.add_argument("--store", default="", help="path or URL for checkpoints")
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    return parser.parse_args()


class Training:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rank = args, dist.get_rank()
        self.job = Pipeline() if args.how == "pp" else Plain(args.how)
        self.optimizer = torch.optim.AdamW(self.job.model.parameters(), lr=1e-3)
        torch.manual_seed(self.rank)
        stored = {"path": args.store, "every": args.every} if args.store else {}
        self.ckpt = holdfast.Checkpointer(
            model=self.job.model,
            optimizer=self.optimizer,
            extra={"sampler": self.job.sampler},
            replicated=self.job.replicas,
            **stored,
        )

    def run(self) -> None:
        with holdfast.phase("restore"):
            time.sleep(self.args.stretch_s)
            first = self.ckpt.restore() + 1
        with (self.args.folder / f"trace-{self.rank}.jsonl").open("a", buffering=1) as trace:
            generation = int(os.environ.get("HOLDFAST_GENERATION", "0"))
            told = {"from": first - 1, "source": self.ckpt.restored_from, "generation": generation}
            trace.write(json.dumps(told) + "\n")
            for step in range(first, self.args.steps + 1):
                samples = self.job.sampler.draw()
                loss = self.job.passed(samples)
                self.optimizer.step()
                self.optimizer.zero_grad()
                told = {"step": step, "digest": digest(self.job.model, self.optimizer), "samples": samples}
                trace.write(json.dumps(told) + "\n")  # before it is saved: what is gone on from has its line
                self.save(step, loss)
                if self.finished():
                    return

    def save(self, step: int, loss: float) -> None:
        time.sleep(self.args.pause_s)
        with holdfast.phase("save"):
            self.ckpt.save(step)
            time.sleep(self.args.stretch_s / 10)
        holdfast.step(step, loss=loss)

    def finished(self) -> bool:
        """Whether the job is to end, which all ranks must see at the same step."""
        seen = torch.tensor(float((self.args.folder / "finish").exists()))
        dist.all_reduce(seen)
        return bool(seen)


def main() -> None:
    args = asked()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Training(args).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
