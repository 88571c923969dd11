"""Backward passes in two halves have the bits of whole ones, and layers for which that cannot be so stay whole."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from holdfast.client.elastic.backward_halves import BackwardHalves, Island, same_bits
from holdfast.client.elastic.layer_state import LayerUnit

WIDTH = 16


class Called(nn.Module):
    """A layer whose forward pass is a function of its parts."""

    def __init__(self, call: Callable[..., torch.Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self._call, self.parts = call, nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._call(x, *self.parts)


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        found: torch.Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))
        return found


def apply(function: type[torch.autograd.Function], *given: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = function.apply(*given)
    return found


class Own(torch.autograd.Function):
    """A product with a weight, written in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum((0, 1))


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def drifting() -> nn.Module:
    """A layer whose gradients are different each time that they are computed."""
    return Called(lambda x, a: a(_drift(x)), linear())


def _drift(x: torch.Tensor) -> torch.Tensor:
    found = x * 1.0
    found.register_hook(lambda gradient: gradient * torch.rand(()))
    return found


def hooked() -> nn.Module:
    made = linear()
    next(made.parameters()).register_hook(lambda gradient: gradient * 2)
    return made


SPLIT: dict[str, Callable[[], nn.Module]] = {
    "a linear layer": linear,
    "a layer of a transformer": Block,
    "convolutions": lambda: nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.Tanh(), nn.Conv1d(5, 5, 3, padding=1)),
    "a weight that is computed": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "recomputation inside of it": lambda: Called(lambda x, a: checkpoint(a, x, use_reentrant=False), Block()),
    "half precision": lambda: nn.Linear(WIDTH, WIDTH).to(torch.bfloat16),
    "a function in Python beside its weights": lambda: Called(lambda x, a: apply(Own, a(x), torch.ones(())), linear()),
}
REFUSED: dict[str, Callable[[], nn.Module]] = {
    "it uses a weight in several places": lambda: Called(lambda x, a: a(torch.tanh(a(x))), linear()),
    "weights enter OwnBackward, which is written in Python": lambda: Called(
        lambda x, a: apply(Own, x, a.weight[0]), nn.Linear(WIDTH, WIDTH, bias=False)
    ),
    "its graph does not show all of its weights": lambda: Called(
        lambda x, a: checkpoint(a, x, use_reentrant=True), linear()
    ),
    "its weights have hooks": hooked,
    "its output does not depend on its input": lambda: Called(lambda x, a: a(x.detach()), linear()),
    "its halves do not have the bits of a whole pass": drifting,
}


def make_passes(
    make: Callable[[], nn.Module], halves: BackwardHalves | None, *, asks: bool = True, passes: int = 3
) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
    """Make forward and backward passes through a layer. Return for each the gradients of its input and its weights."""
    unit, found = LayerUnit(3, make, functools.partial(torch.optim.SGD, lr=0.1), 7), []
    chance = torch.Generator().manual_seed(1)
    kind = unit.parameters[0].dtype
    for _ in range(passes):
        given = torch.randn(2, 5, WIDTH, generator=chance).to(kind).requires_grad_(asks)
        made = unit.module(given).contiguous()
        gradient = torch.randn(made.shape, generator=chance).to(kind)
        if halves is None:
            torch.autograd.backward(made, gradient)
            found.append((given.grad, unit.take_gradients()))
            continue
        came, rest = halves.go_back(unit, Island(3, given, made), gradient)
        found.append((came, unit.take_gradients() if rest is None else rest()))
    return found


def assert_same(make: Callable[[], nn.Module], halves: BackwardHalves, *, asks: bool = True) -> None:
    for mine, whole in zip(make_passes(make, halves, asks=asks), make_passes(make, None, asks=asks), strict=True):
        assert same_bits(mine[0], whole[0]) and same_bits(mine[1], whole[1])


@pytest.mark.parametrize("kind", SPLIT)
def test_halves_have_the_bits_of_a_whole_pass(kind: str) -> None:
    halves = BackwardHalves()
    assert_same(SPLIT[kind], halves)
    assert halves.refused == {}


@pytest.mark.parametrize("reason", REFUSED)
def test_layers_that_cannot_be_split_stay_whole(reason: str) -> None:
    halves = BackwardHalves()
    if reason.endswith("a whole pass"):
        make_passes(REFUSED[reason], halves)
    else:
        assert_same(REFUSED[reason], halves)
    assert halves.refused == {3: reason}
    [line] = halves.describe_refused([3])
    assert line == f"backward passes of layers 3 stay whole, not in halves: {reason}"
    assert halves.describe_refused([3]) == [], "it is told once"


def test_operations_that_fail_when_they_run_again_stay_whole() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.kept = [2.0]
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            times: float = ctx.kept.pop()
            return gradient * times

    halves = BackwardHalves()
    assert_same(lambda: Called(lambda x, a: apply(Once, a(x)), linear()), halves)
    assert halves.refused == {3: "its halves fail: pop from empty list"}


def test_a_layer_whose_input_needs_no_gradient_is_made_later_as_a_whole() -> None:
    halves = BackwardHalves()
    assert_same(REFUSED["it uses a weight in several places"], halves, asks=False)
    assert halves.refused == {}


def test_the_gradient_of_the_input_is_there_before_those_of_weights() -> None:
    """And after the first pass, in which halves are compared with a whole one, no part is computed twice."""
    done: list[str] = []

    def call(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        weight = layer.weight * 1.0
        weight.register_hook(lambda gradient: done.append("weight"))
        x.register_hook(lambda gradient: done.append("input"))
        return nn.functional.linear(x * 1.0, weight)

    unit = LayerUnit(0, lambda: Called(call, nn.Linear(WIDTH, WIDTH, bias=False)), torch.optim.SGD, 7)
    halves = BackwardHalves()
    for number in range(2):
        done.clear()
        given = torch.randn(2, WIDTH, requires_grad=True)
        made = unit.module(given)
        came, rest = halves.go_back(unit, Island(0, given, made), torch.ones_like(made))
        assert came is not None and rest is not None
        if number:
            assert done == ["input"]
            rest()
            assert done == ["input", "weight"]
    assert halves.refused == {}
