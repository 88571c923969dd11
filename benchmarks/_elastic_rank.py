"""The job under holdfast: its ranks survive, and each keeps its state of every step in memory."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from benchmarks._elastic_job import Notes, build_model, make_loss, read_arguments


def main() -> None:
    args = read_arguments()
    dist.init_process_group("gloo")
    rank, notes = dist.get_rank(), Notes(args.events)
    ddp = holdfast.attach(DistributedDataParallel(build_model()))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

    def rehearse() -> None:
        make_loss(ddp).backward()
        optimizer.step()
        optimizer.zero_grad()
        notes.note_spare(rank)

    def train(here: holdfast.Here) -> None:
        ckpt = holdfast.Checkpointer(model=ddp, optimizer=optimizer)
        step = ckpt.restore()
        while True:
            step += 1
            loss = make_loss(ddp)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.save(step)
            holdfast.step(step, loss=loss.detach())
            notes.note_step(here.generation, rank)

    holdfast.survive(model=ddp, optimizer=optimizer, rehearsal=rehearse)(train)()


if __name__ == "__main__":
    main()
