"""A job on one GPU that holds most of its memory: two of them at once do not fit, so a restart proves what was freed.

Events as in _train_ddp.py: start, imported, cuda_up (a context, and a first kernel), held (the memory), pg_up, step.
"""

import argparse
import json
import os
import time
from pathlib import Path

started_at = time.time()

import torch  # noqa: E402  the start counts from before the imports
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

imported_at = time.time()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=Path, required=True, help="folder for the events")
    parser.add_argument("--ckpt", type=Path, required=True, help="not used")
    parser.add_argument("--share", type=float, default=0.7, help="of the device's memory that is held")
    args = parser.parse_args()
    args.events.mkdir(parents=True, exist_ok=True)
    with (args.events / f"{os.getpid()}.jsonl").open("a", buffering=1) as events:

        def note(kind: str, at: float | None = None, step: int = 0) -> None:
            event = {"at": at or time.time(), "kind": kind, "pid": os.getpid(), "rank": 0, "world": 1, "step": step}
            events.write(json.dumps(event) + "\n")

        note("start", started_at)
        note("imported", imported_at)
        torch.cuda.set_device(0)
        torch.ones(8, device="cuda").sum().item()
        note("cuda_up")
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        held = torch.empty(int(args.share * total_bytes), dtype=torch.uint8, device="cuda").fill_(1)
        torch.cuda.synchronize()
        note("held")
        dist.init_process_group("nccl")
        note("pg_up")
        ddp = DistributedDataParallel(nn.Linear(4096, 4096, device="cuda"))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        for step in range(1, 1_000_000):
            loss = ddp(torch.randn(64, 4096, device="cuda")).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.cuda.synchronize()
            note("step", step=step)
            time.sleep(0.05)
        del held


if __name__ == "__main__":
    main()
