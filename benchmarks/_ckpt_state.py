"""The state that the checkpoint benchmark saves: half a gigabyte of weights and AdamW's moments."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

LAYERS = 10
WIDTH = int(os.environ.get("BENCH_WIDTH", "2080"))  # 43 million parameters: with AdamW's moments, 0.52 GB


class State:
    """A model and its optimizer: plain for one rank, by FSDP2 over gloo for more."""

    def __init__(self, *, trained: bool = True) -> None:
        self.model: torch.nn.Module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        if dist.is_initialized() and dist.get_world_size() > 1:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in self.model.children():
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        if trained:
            self.model(torch.ones(1, WIDTH)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def nested(self) -> dict[str, Any]:
        """As torch.distributed.checkpoint wants it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def own(self) -> dict[str, torch.Tensor]:
        """What this rank has, for those who know nothing of DTensors."""
        named = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, kept in enumerate(self.optimizer.state.values()):
            named |= {f"optimizer.{number}.{name}": tensor for name, tensor in kept.items()}
        return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in named.items()}

    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.own().values())
