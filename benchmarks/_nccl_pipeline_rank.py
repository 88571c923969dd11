"""The script of _nccl_rank.py as a pipeline by torch's interleaved schedule: two stages a rank. Gloo without a GPU.

Orders come true inside of the forward pass of a rank's second stage, in the middle of a step.
"""

import os

os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

import holdfast
from benchmarks._detect_rank import STEP_S, WIDTH, Trainer, main
from benchmarks._nccl_rank import NcclTrainer

SCHEDULE = "BENCH_SCHEDULE"  # "1f1b": one stage on each rank
MICROBATCHES, STRUCK = 8, 3  # of a step; the one in whose forward pass orders come true
LIKE = NcclTrainer if torch.cuda.is_available() else Trainer


class Stage(nn.Module):
    def __init__(self, trainer: "PipelineTrainer", last: bool) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self._trainer, self._last, self._count = [trainer], last, 0  # in a list: no module of this one

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self._count += 1
        trainer = self._trainer[0]
        if self._last and self._count % MICROBATCHES == STRUCK:
            trainer._obey(trainer.orders.read(trainer.step))
        found: torch.Tensor = self.layer(batch)
        return found


class PipelineTrainer(LIKE):  # type: ignore[misc, valid-type]
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._first, self._last = self.rank == 0, self.rank == dist.get_world_size() - 1
        each = 1 if os.environ.get(SCHEDULE) == "1f1b" else 2
        world = dist.get_world_size()
        parts = [Stage(self, n == each - 1).to(self.device) for n in range(each)]
        stages = [PipelineStage(part, self.rank + n * world, each * world, self.device) for n, part in enumerate(parts)]
        self._parameters = [parameter for part in parts for parameter in part.parameters()]
        self.optimizer = torch.optim.SGD(self._parameters, lr=1e-3)
        loss = nn.functional.mse_loss
        self._schedule = (
            Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss)
            if each == 1
            else ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss)  # type: ignore[arg-type]
        )

    def train(self) -> None:
        while True:
            batch = torch.randn(MICROBATCHES * 4, WIDTH, device=self.device)
            self.compute(STEP_S)
            losses: list[torch.Tensor] = []
            self.optimizer.zero_grad()
            if self._first:
                self._schedule.step(batch)
            elif self._last:
                self._schedule.step(target=torch.zeros_like(batch), losses=losses)
            else:
                self._schedule.step()
            self.optimizer.step()
            self.step += 1
            if losses:
                holdfast.step(self.step, torch.stack(losses).mean().item() + self._spoilt)
            else:
                holdfast.step(self.step)
            self._note()


if __name__ == "__main__":
    main(PipelineTrainer)
