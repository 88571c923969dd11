"""A job to be tortured: it snapshots every step, tells from outside which part of a save each rank is in, and leaves a
digest of the state after every step, so that every step of a disturbed run can be held against an undisturbed one.

Into FOLDER each rank writes `page-RANK`, what it does right now, and `trace-RANK.jsonl`, one line per restore and step.
A file `finish` ends the job. Parts of a save that are too short to be hit are stretched. HOLDFAST_TORTURE in the
environment holds more arguments.
"""

import argparse
import json
import mmap
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.checkpoint import arena, memory_copy
from holdfast.checkpoint.keeper_client import current_generation

PAGE_BYTES = 4096
START, RESTORE, TRAIN, COPY, COPIED, SEALED = range(6)  # what a rank does; COPIED: all but the seal is done


class Page:
    """What the rank does right now: phase, pid, generation, step."""

    def __init__(self, path: Path) -> None:
        with path.open("ab") as file:
            file.truncate(PAGE_BYTES)
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), PAGE_BYTES)).cast("q")
        self._words[0], self._words[1], self._words[2], self._words[3] = START, os.getpid(), current_generation(), 0

    @property
    def phase(self) -> int:
        return self._words[0]

    def mark(self, phase: int) -> None:
        self._words[0] = phase

    def step(self, step: int) -> None:
        self._words[3] = step


def tell_of_saves(page: Page, stretch_s: float) -> None:
    """Have a save say where it is; its own work is done as ever, in pieces where time is to be had between them."""
    run, seal = memory_copy.MemoryCopier.copy_moves, arena.SnapshotSlot.seal

    def copy(self: memory_copy.MemoryCopier, moves: Iterable[memory_copy.Move], **how: bool) -> None:
        if page.phase != TRAIN:  # restoring copies too
            return run(self, moves, **how)
        page.mark(COPY)
        whole = list(moves)
        piece = len(whole) // 4 + 1
        for start in range(0, len(whole), piece):
            time.sleep(stretch_s / 4)
            run(self, whole[start : start + piece], **how)
        page.mark(COPIED)
        return time.sleep(stretch_s)

    def sealed(self: arena.SnapshotSlot) -> None:
        seal(self)
        page.mark(SEALED)
        time.sleep(stretch_s)

    memory_copy.MemoryCopier.copy_moves = copy  # type: ignore[method-assign]
    arena.SnapshotSlot.seal = sealed  # type: ignore[method-assign]


def wrapped(how: str, width: int) -> nn.Module:
    """A model on its ranks; all start with the same weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64), nn.Dropout(0.1), nn.Linear(64, 64))
    world = dist.get_world_size()
    if how == "tp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for layer in (model[0], model[2], model[4]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    return holdfast.attach(DistributedDataParallel(model))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all that this rank holds, its random numbers too."""
    found = xxhash.xxh3_128()
    for parameter in model.parameters():
        own = optimizer.state[parameter]
        for tensor in (parameter.detach(), *(own[name] for name in sorted(own))):
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found.update(part.contiguous().view(torch.uint8).numpy().data if part.dim() else part.numpy().tobytes())
    found.update(torch.get_rng_state().numpy().tobytes())
    return found.hexdigest()


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--how", choices=("ddp", "fsdp", "tp"), default="ddp")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--work", type=int, default=1, help="forward and backward passes in each step")
    parser.add_argument("--pause-s", type=float, default=0.0, help="sleep in each step")
    parser.add_argument("--stretch-s", type=float, default=0.0, help="sleep in each part of a save")
    parser.add_argument("--store", default="", help="URL for checkpoints")
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--keep", type=int, default=3)
    return parser.parse_args(sys.argv[1:] + os.environ.get("HOLDFAST_TORTURE", "").split())


class Training:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank = dist.get_rank()
        self.page = Page(args.folder / f"page-{self.rank}")
        tell_of_saves(self.page, args.stretch_s)
        self.model = wrapped(args.how, args.width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(0 if args.how == "tp" else self.rank)
        stored = {"path": args.store, "every": args.every, "keep": args.keep} if args.store else {}
        self.ckpt = holdfast.Checkpointer(model=self.model, optimizer=self.optimizer, **stored)

    def run(self) -> None:
        with (self.args.folder / f"trace-{self.rank}.jsonl").open("a", buffering=1) as trace:
            first = self.restore() + 1
            told = {"from": first - 1, "source": self.ckpt.restored_from, "pid": os.getpid()}
            trace.write(json.dumps(told | ({"digest": self.digest()} if first > 1 else {})) + "\n")
            for step in range(first, self.args.steps + 1):
                began_at = time.perf_counter()
                self.step(step)
                took_s = time.perf_counter() - began_at
                told = {"step": step, "digest": self.digest(), "took_s": took_s, "at": time.time()}
                trace.write(json.dumps(told) + "\n")
                if self.finished():
                    return

    def restore(self) -> int:
        self.page.mark(RESTORE)
        time.sleep(self.args.stretch_s)
        step = self.ckpt.restore()
        time.sleep(self.args.stretch_s)
        return step

    def step(self, step: int) -> None:
        self.page.step(step)
        self.page.mark(TRAIN)
        losses = [self.passed() for _ in range(self.args.work)]
        self.optimizer.step()
        self.optimizer.zero_grad()
        time.sleep(self.args.pause_s)
        self.ckpt.save(step)
        holdfast.step(step, loss=losses[-1])

    def passed(self) -> float:
        """Forward and backward."""
        x = torch.randn(8, 64)
        loss: torch.Tensor = (self.model(x) - x).square().mean()
        loss.backward()
        return loss.item()

    def digest(self) -> str:
        return digest(self.model, self.optimizer)

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
