"""A training job in small, with something of everything that a state can hold."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

import holdfast


class Net(nn.Module):
    """Something of everything: buffers, tied weights, a parameter that is never used, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight = self.middle.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.small = nn.Parameter(torch.randn(16).bfloat16())
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.last(self.middle(self.drop(self.norm(self.first(x)))) * self.small.float())
        return found

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "tensor": torch.tensor([self.calls])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Loader:
    """As a StatefulDataLoader."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "worker": [{"rng": numpy.arange(self.at)}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]
OPTIMIZERS: dict[str, Optimizers] = {
    "adamw": lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-2)],
    "amsgrad": lambda m: [torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True, foreach=True)],
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), lr=1e-2)],
    "momentum": lambda m: [torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, dampening=0.5)],
    "adafactor": lambda m: [torch.optim.Adafactor(m.parameters(), lr=1e-2)],
    "asgd": lambda m: [torch.optim.ASGD(m.parameters(), lr=1e-2)],
    "groups": lambda m: [
        torch.optim.AdamW([{"params": m.first.parameters(), "lr": 0.1}, {"params": m.middle.parameters()}], lr=1e-2)  # type: ignore[union-attr]
    ],
    "two": lambda m: [torch.optim.AdamW(m.first.parameters()), torch.optim.RMSprop(m.middle.parameters())],  # type: ignore[union-attr]
    "silent": lambda m: [Silent([p for name, p in m.named_parameters() if name != "unused"], lr=1e-2)],
}


class Silent(torch.optim.SGD):
    """Does not work for a stand-in, so nobody can tell what it will keep."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.data_ptr() not in MEMORY:
                    raise RuntimeError("who are you?")
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
                    state["count"] = state.get("count", 0) + 1
                    parameter.sub_(state["sum"], alpha=group["lr"] / state["count"])


MEMORY: set[int] = set()


class Job:
    """One training process, so to say."""

    def __init__(self, seed: int, optimizers: Optimizers = OPTIMIZERS["adamw"], **asked: Any) -> None:
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        self.model = Net()
        MEMORY.update(p.data_ptr() for p in self.model.parameters())
        self.optimizers = optimizers(self.model)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizers[0], [3, 8])
        self.loader = Loader()
        self.rng = numpy.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.extra: dict[str, Any] = {"schedule": self.schedule, "loader": self.loader, "epoch": 0}
        self.extra |= {"rng": self.rng, "generator": self.generator, "random": random.Random(seed)}
        self.ckpt = holdfast.Checkpointer(model=self.model, optimizer=self.optimizers, extra=self.extra, **asked)

    def train(self, first: int, last: int, save: bool = True) -> "Job":
        for step in range(first, last + 1):
            x = torch.randn(8, 6) * random.random() * numpy.random.rand() + self.rng.random()
            x = x + torch.rand(6, generator=self.generator) + self.extra["random"].random()
            self.model(x).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.schedule.step()
            self.loader.at += 1
            self.extra["epoch"] = step // 4
            if save:
                assert self.ckpt.save(step)
        return self

    def everything(self) -> dict[str, Any]:
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": [optimizer.state_dict() for optimizer in self.optimizers],
            "rest": [self.schedule.state_dict(), self.loader.at, self.extra["epoch"]],
            "chance": [random.random(), numpy.random.rand(), torch.rand(3), self.rng.random()],
            "more": [torch.rand(1, generator=self.generator), self.extra["random"].random()],
        }


def same(one: object, other: object) -> bool:
    """Bit for bit, and in the same order."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)
