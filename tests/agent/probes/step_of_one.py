"""One rank of a parallel step that compares itself with the step of one: PORT WORLD RANK."""

import os
import sys

import torch
import torch.distributed as dist

from holdfast.agent.probes.minigpt_collectives import RankExchange
from holdfast.agent.probes.minigpt_model import MiniGptForm, train_step
from holdfast.agent.probes.parallel_reference import _join_axes, plan_rounds
from holdfast.agent.probes.probe_tools import CPU


def main() -> None:
    port, world, rank = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for seats in plan_rounds(world):
        axes = _join_axes(seats, rank)
        assert axes is not None
        for experts in (0, 4):
            form = MiniGptForm(width=64, layers=2, length=16, experts=experts)
            alone, mine = train_step(form, CPU), train_step(form, CPU, RankExchange(**axes))
            loss = mine[0].clone()
            if experts:  # each rank has that of its part of the batch
                dist.all_reduce(loss, group=axes["inner"].group)
            torch.testing.assert_close(loss, alone[0] if axes["stage"].is_last else torch.zeros(()))
            torch.testing.assert_close(
                mine[1], alone[1]
            )  # the gradient of the table of tokens, of which all have a part
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
