"""The job under nvidia-resiliency-ext's in-process restart: its function is called again in the ranks that are left.

State is not its business: the script saves to a file every ten steps and loads it when it is called, as NVIDIA advises.
"""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._elastic_job import Notes, build_model, make_loss, read_arguments

GROUP_S = 10.0  # limit of a collective, as in NVIDIA's example: nothing else ends a wait in gloo
LOOK_S = 0.1  # how often everything is looked at; its default is 1 s, also for `last_call_wait`
SAVE_EVERY = 10


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    beside = path.with_suffix(".tmp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, beside)
    beside.replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def main() -> None:
    args = read_arguments()
    notes, model = Notes(args.events), build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    port, world = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    first = os.environ["RANK"] == "0"
    store = dist.TCPStore("127.0.0.1", port, world, is_master=first, multi_tenant=True, wait_for_workers=False)
    look = timedelta(seconds=LOOK_S)

    @inprocess.Wrapper(  # type: ignore[untyped-decorator]
        store_kwargs={"port": int(os.environ["WRAPPER_PORT"])},
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.MaxActiveWorldSize(args.seats), inprocess.rank_assignment.ShiftRanks()
        ),
        monitor_thread_interval=look,
        monitor_process_interval=look,
        heartbeat_interval=look,
        progress_watchdog_interval=look,
        last_call_wait=look,
    )
    def train(call: inprocess.CallWrapper = None) -> None:  # the wrapper puts itself there
        rank = int(os.environ["RANK"])
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(call.iteration), store),
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=GROUP_S),
        )
        ddp = DistributedDataParallel(model)
        step = load(args.ckpt, model, optimizer)
        while True:
            step += 1
            loss = make_loss(ddp)
            optimizer.zero_grad()
            loss.backward()
            with call.atomic():
                optimizer.step()
            if rank == 0 and step % SAVE_EVERY == 0:
                save(args.ckpt, model, optimizer, step)
            call.ping()
            notes.note_step(call.iteration + 1, rank)

    train()


if __name__ == "__main__":
    main()
