"""A small DDP job that any launcher runs: a checkpoint on shared storage now and then, and with --snapshots by
holdfast's Checkpointer. Each process writes what it does to a file of its own in EVENTS, with its host and the time."""

import argparse
import json
import os
import socket
import time
from pathlib import Path
from typing import TextIO

started_at = time.time()

import torch  # noqa: E402  the start counts from before the imports, which are most of a cold start
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import holdfast  # noqa: E402


class FileCheckpoint:
    """What a script does by itself: rank 0 writes a file, whose name is new."""

    def __init__(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> None:
        self._path, self._model, self._optimizer, self._every = path, model, optimizer, every

    def restore(self) -> int:
        if not self._path.exists():
            return 0
        state = torch.load(self._path, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def save(self, step: int) -> None:
        if dist.get_rank() == 0 and step % self._every == 0:
            beside = self._path.with_suffix(".new")
            state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict(), "step": step}
            torch.save(state, beside)
            beside.replace(self._path)


def train(args: argparse.Namespace, events: TextIO) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    ckpt: FileCheckpoint | holdfast.Checkpointer = FileCheckpoint(args.ckpt, ddp.module, optimizer, args.every)
    if args.snapshots:
        ckpt = holdfast.Checkpointer(model=ddp, optimizer=optimizer, path=f"{args.ckpt}.d", every=args.every)
    step = ckpt.restore()
    note(events, "loaded", step)
    while True:
        loss = ddp(torch.randn(8, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        ckpt.save(step)
        holdfast.step(step)  # which does nothing under other launchers
        note(events, "step", step)
        time.sleep(args.step_time)


def note(events: TextIO, kind: str, step: int = 0, at: float = 0.0) -> None:
    rank, host = int(os.environ["RANK"]), socket.gethostname()
    events.write(json.dumps({"at": at or time.time(), "kind": kind, "rank": rank, "host": host, "step": step}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--ckpt", type=Path, required=True)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints on storage")
    parser.add_argument("--step-time", type=float, default=0.1, help="seconds to sleep in each step")
    parser.add_argument("--snapshots", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.events / f"{socket.gethostname()}-{time.time_ns()}.jsonl"
    with path.open("a", buffering=1) as events:
        note(events, "start", at=started_at)
        dist.init_process_group("gloo")
        train(args, events)


if __name__ == "__main__":
    main()
