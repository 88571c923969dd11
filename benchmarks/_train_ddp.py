"""A tiny DDP job that runs unchanged under any launcher and writes down what each rank does, and when.

Every rank appends one JSON object per event to EVENTS/<pid>.jsonl: start, pg_up, loaded, step, and raised when it found
EVENTS/raise-<rank>, which is an order to raise an exception. So the job is timed from outside, without trusting what a
launcher says about itself.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TextIO

started_at = time.time()

import torch  # noqa: E402  the start counts from before the imports, which are most of a cold start
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def note(events: TextIO, kind: str, *, at: float | None = None, world: int = 0, step: int = 0) -> None:
    rank = int(os.environ.get("RANK", "0"))
    event = {"at": at or time.time(), "kind": kind, "pid": os.getpid(), "rank": rank, "world": world, "step": step}
    events.write(json.dumps(event) + "\n")


def heartbeats(wanted: bool) -> Callable[[], object]:
    """How nvidia-resiliency-ext is told of a step; the one launcher that has to be told."""
    if not wanted:
        return lambda: None
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    beat: Callable[[], object] = client.send_heartbeat
    return beat


def obey(args: argparse.Namespace, events: TextIO) -> None:
    order: Path = args.events / f"raise-{dist.get_rank()}"
    if order.exists():
        order.unlink()
        note(events, "raised")
        raise RuntimeError("a batch that nobody can digest")


def train(args: argparse.Namespace, events: TextIO) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    step = restore(args.ckpt, ddp.module)
    note(events, "loaded", step=step)
    beat = heartbeats(args.heartbeats)
    while step < args.steps:
        obey(args, events)
        loss = ddp(torch.randn(8, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        note(events, "step", step=step)
        beat()
        if dist.get_rank() == 0 and step % args.ckpt_every == 0:
            save(args.ckpt, ddp.module, step)
        time.sleep(args.step_time)


def save(path: Path, model: nn.Module, step: int) -> None:
    beside = path.with_suffix(".tmp")
    torch.save({"model": model.state_dict(), "step": step}, beside)
    beside.replace(path)


def restore(path: Path, model: nn.Module) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    return int(state["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=Path, required=True, help="folder for the events")
    parser.add_argument("--ckpt", type=Path, required=True, help="file for the checkpoint")
    parser.add_argument("--ckpt-every", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--step-time", type=float, default=0.1, help="seconds to sleep in each step")
    parser.add_argument("--timeout", type=float, default=0.0, help="seconds of a collective (default: torch's own)")
    parser.add_argument("--heartbeats", action="store_true", help="tell nvidia-resiliency-ext of every step")
    args = parser.parse_args()
    args.events.mkdir(parents=True, exist_ok=True)
    with (args.events / f"{os.getpid()}.jsonl").open("a", buffering=1) as events:
        note(events, "start", at=started_at)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout) if args.timeout else None)
        note(events, "pg_up", world=dist.get_world_size())
        train(args, events)
    # After `train`, which has let go of DDP by then: a DDP that outlives its group can deadlock when it is freed.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
