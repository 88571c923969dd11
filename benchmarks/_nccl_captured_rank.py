"""The script of _nccl_rank.py with its whole step in a captured graph, whose replays torch's recorder does not see."""

import copy
import os

os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")

import torch
import torch.distributed as dist

import holdfast
from benchmarks._detect_rank import STEP_S, WIDTH, main
from benchmarks._nccl_rank import NcclTrainer

WARM = 3


class CapturedTrainer(NcclTrainer):
    def train(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._net = copy.deepcopy(self.model.module)  # DDP's own cannot be captured: it was used on another stream
        self.optimizer = torch.optim.SGD(self._net.parameters(), lr=1e-3)
        self._batch = torch.zeros(8, WIDTH, device=self.device)
        self._over = torch.zeros(2, device=self.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self._captured_step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._captured_step()
        while not self._over[1]:
            self._batch.copy_(next(self.batches))
            self.compute(STEP_S)
            self._obey(self.orders.read(self.step))
            self._over[1] = float((self.folder / "finish").exists())
            graph.replay()
            self.step += 1
            holdfast.step(self.step, self._over[0].item() + self._spoilt)
            self._note()

    def _captured_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._net(self._batch).square().mean()
        loss.backward()
        for parameter in self._net.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self._over[0] = loss.detach()
        dist.all_reduce(self._over)


if __name__ == "__main__":
    main(CapturedTrainer)
