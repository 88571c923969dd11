"""A rank of the job whose copies to peers are timed: collectives, a pause as while a device computes, a snapshot."""

import argparse
import os
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

import holdfast
from benchmarks._harness import Event

REDUCED, WIDTH, PAUSE_S = 1_000_000, 400, 0.4  # floats in each of two collectives; of a layer that is the state


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--ckpt")
    events = parser.parse_args().events
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, gradient = dist.get_rank(), torch.ones(2, REDUCED)
    net = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    net(torch.ones(1, WIDTH)).sum().backward()  # once: devices compute, not this processor
    ckpt = holdfast.Checkpointer(model=net, optimizer=optimizer)
    step = ckpt.restore()
    events.mkdir(exist_ok=True)
    with (events / f"{rank}.jsonl").open("ab", buffering=0) as notes:
        while True:
            step += 1
            for work in [dist.all_reduce(half, async_op=True) for half in gradient]:
                work.wait()
            time.sleep(PAUSE_S)
            optimizer.step()
            ckpt.save(step)
            holdfast.step(step)
            told = Event(at=time.time(), kind="step", pid=os.getpid(), rank=rank, step=step)
            notes.write(msgspec.json.encode(told) + b"\n")


if __name__ == "__main__":
    main()
