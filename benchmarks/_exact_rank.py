"""A DDP job whose weights are the same, bit for bit, whatever befalls it; steps are as long as they are asked to be.

Events as in _train_ddp.py: start, pg_up, loaded (step: from which), step, and done with a digest beside it.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import TextIO

started_at = time.time()

import torch  # noqa: E402  the start counts from before the imports, which are most of a cold start
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import holdfast  # noqa: E402

RELEASE = 1  # another tree has another number here
BROKEN = False  # and a bad one has True
WIDTH, BATCH = 128, 16


def note(events: TextIO, kind: str, *, at: float | None = None, step: int = 0) -> None:
    rank = int(os.environ.get("RANK", "0"))
    event = {"at": at or time.time(), "kind": kind, "pid": os.getpid(), "rank": rank, "world": RELEASE, "step": step}
    events.write(json.dumps(event) + "\n")


def batch(step: int) -> torch.Tensor:
    """Every random number of a step follows from the step and the rank."""
    torch.manual_seed(step * 100_003 + dist.get_rank())
    return torch.randn(BATCH, WIDTH)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
        for name, kept in sorted(optimizer.state[parameter].items()):
            found.update(name.encode() + kept.numpy().tobytes())
    return found.hexdigest()


def train(args: argparse.Namespace, events: TextIO) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # By default DDP rebuilds its buckets after the first backward of each launch, and then sums in another order.
    ddp = holdfast.attach(DistributedDataParallel(model, find_unused_parameters=True))
    checkpointer = holdfast.Checkpointer(model=ddp, optimizer=optimizer, path=args.ckpt, every="20s")
    start = checkpointer.restore()
    note(events, "loaded", step=start)
    for step in range(start + 1, args.steps + 1):
        due_at = time.monotonic() + args.period
        inputs = batch(step)
        loss = (ddp(inputs) - inputs.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        holdfast.step(step, loss=loss.item())
        checkpointer.save(step)
        note(events, "step", step=step)
        if BROKEN and step > start + 2:
            raise TypeError("'NoneType' object is not subscriptable")
        time.sleep(max(0.0, due_at - time.monotonic()))
    if dist.get_rank() == 0:
        args.out.write_text(digest(model, optimizer))
    note(events, "done", step=args.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=Path, required=True, help="folder for the events")
    parser.add_argument("--ckpt", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="file for the digest of the final state")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--period", type=float, default=0.1, help="seconds of a step")
    args = parser.parse_args()
    args.events.mkdir(parents=True, exist_ok=True)
    with (args.events / f"{os.getpid()}.jsonl").open("a", buffering=1) as events:
        note(events, "start", at=started_at)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        dist.init_process_group("gloo")
        note(events, "pg_up")
        train(args, events)
    # After `train`, which has let go of DDP by then: a DDP that outlives its group can deadlock when it is freed.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
