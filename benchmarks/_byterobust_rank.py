"""The script of the benchmark of hangs with a pipeline of two stages, each a tensor group of two ranks on one node."""

from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks._detect_rank import WIDTH, Trainer, main


class PipelineTrainer(Trainer):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.stage, place = divmod(self.rank, 2)
        self.peer = 2 * (1 - self.stage) + place
        tensors = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.tensor = tensors[self.stage]

    def loss_of(self, batch: torch.Tensor) -> torch.Tensor:
        """Forward and back through both stages, with a sum over the tensor group in each."""
        passed = batch if self.stage == 0 else torch.empty(8, WIDTH)
        if self.stage == 1:
            dist.recv(passed, self.peer)
        out = self.model.module(passed)
        whole = out.detach().clone()
        dist.all_reduce(whole, group=self.tensor)
        if self.stage == 0:
            dist.send(whole, self.peer)
            dist.recv(whole, self.peer)
        else:
            dist.send(whole, self.peer)
        loss: torch.Tensor = (out * whole).mean()
        return loss


if __name__ == "__main__":
    main(PipelineTrainer)
