"""The job with nothing around it but torchrun: what a step takes without anybody who could save it."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks._elastic_job import Notes, build_model, make_loss, read_arguments


def main() -> None:
    args = read_arguments()
    dist.init_process_group("gloo")
    notes = Notes(args.events)
    ddp = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    while True:
        loss = make_loss(ddp)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        notes.note_step(1, dist.get_rank())


if __name__ == "__main__":
    main()
