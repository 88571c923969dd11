"""What an optimizer will keep is known before its first step, and asking changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast.client.checkpointing.optimizer_shapes import BlankTensor, allocate_state, foresee_state

MAKE: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p),
    "SGD momentum": lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW lr tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


def parameters() -> list[nn.Parameter]:
    shapes: list[tuple[int, ...]] = [(4, 3), (3,), (2, 2, 2, 2), ()]
    made = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    made.append(nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)))
    return [*made, nn.Parameter(torch.randn(5).bfloat16()), nn.Parameter(torch.randn(3), requires_grad=False)]


def described(kept: dict[str, Any]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in kept.items():
        tensor = value.like if isinstance(value, BlankTensor) else value
        if isinstance(tensor, torch.Tensor):
            found[name] = (tensor.shape, tensor.stride(), tensor.dtype, value.device)
        else:
            found[name] = type(value)
    return found


@pytest.mark.parametrize("how", MAKE)
def test_it_comes_as_foreseen(how: str) -> None:
    tensors = parameters()
    optimizer = MAKE[how](tensors)
    before, rng = [tensor.detach().clone() for tensor in tensors], torch.get_rng_state()
    held, groups = dict(optimizer.state), [dict(group) for group in optimizer.param_groups]
    steps: list[object] = []
    hook = register_optimizer_step_post_hook(lambda *told: steps.append(told))
    kept = foresee_state(optimizer)
    hook.remove()
    assert kept is not None and not steps
    assert dict(optimizer.state) == held and optimizer.param_groups == groups
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(tensors, before, strict=True))
    for tensor in tensors[:-1]:
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    assert list(kept) == tensors[:-1], "what is not trained has nothing"
    for tensor in tensors[:-1]:
        assert described(kept[tensor]) == described(optimizer.state[tensor])
        assert described(allocate_state(tensor, kept[tensor])) == described(optimizer.state[tensor])


def test_one_that_does_not_tell() -> None:
    assert foresee_state(torch.optim.LBFGS([nn.Parameter(torch.ones(2))])) is None
