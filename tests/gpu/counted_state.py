"""A state on a GPU in which every number is that of its step, and a reader who looks at its snapshots all the while."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from holdfast.checkpoint.arena import Arena
from holdfast.client.checkpointing.checkpointer import Checkpointer
from holdfast.client.snapshot.rank_snapshots import RankSnapshots

BUSY = 20_000_000  # cycles that a queued kernel idles: about 10 ms

Found = dict[str, Any]


class Counting(torch.optim.SGD):
    """Every parameter and all that is kept for it is the number of the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("kept", torch.zeros_like(parameter)).add_(1)
                parameter.copy_(state["kept"])


class Counted(nn.Module):
    """Buffers that change in the forward pass, right behind a snapshot."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.large = nn.ParameterList([torch.zeros(size) for _ in range(6)])
        self.small = nn.Parameter(torch.zeros(7))
        self.register_buffer("seen", torch.zeros(5))
        self.register_buffer("table", torch.zeros(size))
        self.seen: torch.Tensor
        self.table: torch.Tensor

    def forward(self) -> torch.Tensor:
        self.seen.add_(1)
        self.table.add_(1)
        return torch.stack([one.sum() for one in (*self.large, self.small)]).sum()


def looked_at(ckpt: Checkpointer, arena: Arena, train: Callable[[int], None], saves: int, done: int = 0) -> Found:
    images = snapshots_of(ckpt).images
    looked = taken = 0
    for step in range(1, saves + 1):
        train(step)
        if step > done:
            taken += ckpt.save(step)
        looked += look(arena, images)
    ckpt.close()
    looked += look(arena, images)
    newest = arena.list_sealed()[0].step
    assert newest == saves, f"the newest of {saves} is {newest}"
    return {"saves": taken, "skipped": ckpt.skipped, "snapshots looked at": looked, "torn or stale": 0}


def look(arena: Arena, images: list[Any]) -> int:
    """Every tensor of every sealed snapshot holds the number of its step, and nothing else."""
    looked = 0
    for sealed in arena.list_sealed():
        image = images[sealed.slot]
        found = {}
        for index, item in enumerate(image.layout.items):
            if item.spec.dtype == "float32":
                low, high = image.payloads[index].aminmax()
                found[item.spec.key] = (float(low), float(high))
        if arena.slot_seq(sealed.slot) != sealed.seq:
            continue  # overtaken
        looked += 1
        for key, seen in found.items():
            assert seen == (sealed.step, sealed.step), f"step {sealed.step}: {key} is {seen}"
    return looked


def snapshots_of(ckpt: Checkpointer) -> RankSnapshots:
    assert ckpt._snapshots and ckpt._snapshots.side
    return ckpt._snapshots
