"""The job under torchft: each rank is a replica of its own, and heals from a live one when it comes back.

A step counts if torchft has committed it. A replica beyond the seats has no part in the gradient: it stands by.
"""

import os
from datetime import timedelta
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.manager import WorldSizeMode

from benchmarks._elastic_job import Notes, build_model, make_loss, read_arguments

GROUP_S, CALL_S = 5.0, 30.0  # limits of a collective and of everything else, as in torchft's own example


class CountedGloo(ProcessGroupGloo):  # type: ignore[misc]
    """Gloo as torchft makes it anew, with the number of the quorum that it is for."""

    quorum = 0

    def configure(self, store: str, replica: str, rank: int, world: int, quorum: int = 0, *more: Any) -> None:
        super().configure(store, replica, rank, world, quorum, *more)
        self.quorum = quorum


def main() -> None:
    args = read_arguments()
    notes, model = Notes(args.events), build_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    spares = int(os.environ["NUM_REPLICA_GROUPS"]) - args.seats
    group = CountedGloo(timeout=timedelta(seconds=GROUP_S))
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=args.seats if spares else 1,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if spares else WorldSizeMode.DYNAMIC,
        timeout=timedelta(seconds=CALL_S),
        replica_id=f"bench_{os.environ['REPLICA_GROUP_ID']}",
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    while True:
        committed = manager.current_step()
        optimizer.zero_grad()  # begins the quorum
        make_loss(ddp).backward()
        optimizer.step()
        if manager.current_step() == committed:
            continue
        rank = manager.participating_rank()
        if rank is None:
            notes.note_spare(-1)
        else:
            notes.note_step(group.quorum + 1, rank)


if __name__ == "__main__":
    main()
