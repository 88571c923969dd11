"""The script of _detect_rank.py over NCCL, with what only GPUs can do wrong.

Ranks may share a GPU: each counts as a host of its own, and they speak over sockets. Times of steps then mean little.
"""

import os

os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")

from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks._detect_rank import Order, Trainer, main

FOR_EVER = 10**14  # cycles of the GPU: most of a day
ON_GPU = "BENCH_ON_GPU"  # set: steps take their time on the GPU, and processes run ahead of it


def stand(_: object = None) -> None:
    torch.cuda._sleep(FOR_EVER)


def cycles_a_second(cycles: int = 10**8) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):  # the last counts: clocks have gone up by then
        began.record()
        torch.cuda._sleep(cycles)
        ended.record()
    torch.cuda.synchronize()
    return 1e3 * cycles / float(began.elapsed_time(ended))


class NcclTrainer(Trainer):
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count()))

    def __init__(self, folder: Path) -> None:
        torch.cuda.set_device(self.device)
        self._cycles_a_second = cycles_a_second() if os.environ.get(ON_GPU) else 0.0
        super().__init__(folder)
        self._stands_in_backward = False

    def compute(self, seconds: float) -> None:
        """On the GPU by its clock, which goes on while another process has its turn: sharing makes it no longer."""
        if os.environ.get(ON_GPU):
            torch.cuda._sleep(int(seconds * self._cycles_a_second))
        else:
            super().compute(seconds)

    def loss_of(self, batch: torch.Tensor) -> torch.Tensor:
        found = self.model(batch)
        if self._stands_in_backward:
            found.register_hook(stand)
        loss: torch.Tensor = found.square().mean()
        return loss

    # --- GPUs that stand ---------------------------------------------------------------------------------------

    def _gpu_forward(self, order: Order) -> None:
        stand()

    def _gpu_backward(self, order: Order) -> None:
        self._stands_in_backward = True

    def _gpu_copy(self, order: Order) -> None:
        """A stream that copies, and for which the others wait."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            stand()
            torch.ones(1 << 20).pin_memory().to(self.device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    def _gpu_graph(self, order: Order) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            stand()
        graph.replay()

    # --- and other ends ----------------------------------------------------------------------------------------

    def _gpu_assert(self, order: Order) -> None:
        torch.ones(4, device=self.device)[torch.tensor([10**6], device=self.device)].sum().item()

    def _other(self, order: Order) -> None:
        """Another collective than the others', under the same number."""
        dist.broadcast(torch.ones(7, device=self.device), dist.get_rank())


if __name__ == "__main__":
    main(NcclTrainer)
