"""Predicts the state that an optimizer will keep for its parameters, before its first step.

An image is laid out when training starts, but optimizers create their state in their first step. So a shadow of the
optimizer makes a first step on tensors without memory. If the step must read values, the shadow gets zeros of the same
shapes instead, one parameter at a time. The optimizer itself and the parameters are not touched.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.checkpoint.state_image import local_tensor


class BlankTensor(NamedTuple):
    """A tensor that an optimizer will create, known by its shape alone."""

    like: torch.Tensor  # without memory; of a DTensor what this rank will have
    device: torch.device
    spread: bool  # it will be a DTensor, placed as its parameter is

    def stand_in(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._spread_like(self.like, parameter)

    def make_tensor(self, parameter: torch.Tensor, make: "Make") -> torch.Tensor:
        return self._spread_like(make(self.like, self.device), parameter)

    def _spread_like(self, part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if not self.spread:
            return part
        whole = cast(DTensor, parameter)
        mesh, placements = whole.device_mesh, whole.placements
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        ).detach()


Make = Callable[[torch.Tensor, torch.device], torch.Tensor]  # a tensor like one without memory, on a device
Kept = dict[str, Any]  # name -> Blank, value, or a dict of the same kind


def foresee_state(
    optimizer: Optimizer, is_trained: Callable[[torch.Tensor], bool] = lambda parameter: parameter.requires_grad
) -> dict[torch.Tensor, Kept] | None:
    """Return the state that the optimizer will keep for each trained parameter; None if it cannot be predicted."""
    known: dict[tuple[object, ...], Kept] = {}
    kept: dict[torch.Tensor, Kept] = {}
    held = [(n, p) for n, group in enumerate(optimizer.param_groups) for p in group["params"]]
    trained = [(n, p) for n, p in held if is_trained(p)]
    for number, parameter in trained:
        part, group = local_tensor(parameter), optimizer.param_groups[number]
        kind = (number, part.shape, part.stride(), part.dtype, part.device, isinstance(parameter, DTensor))
        if kind not in known:
            found = _try_first_step(optimizer, group, parameter, "meta") or _try_first_step(
                optimizer, group, parameter, "cpu"
            )
            if found is None:
                return None
            known[kind] = found[0]
        kept[parameter] = known[kind]
    return kept


def _try_first_step(
    optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor, device: str
) -> tuple[Kept] | None:
    try:
        return (_first_step(optimizer, group, parameter, device),)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError):
        return None  # it reads values, or needs a closure


def _first_step(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor, device: str) -> Kept:
    part = local_tensor(parameter)
    blank = torch.nn.Parameter(torch.zeros_like(part, device=device), requires_grad=part.is_floating_point())
    blank.grad = torch.zeros_like(blank)
    # These only choose among kernels, of which some want memory; and whether counts lie beside the parameter.
    plain: Kept = {name: False for name in ("foreach", "fused", "capturable", "differentiable") if name in group}
    rates: Kept = {name: 0.5 for name, value in group.items() if isinstance(value, torch.Tensor)}
    hooks: dict[str, OrderedDict[int, object]] = {
        name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")
    }
    double = object.__new__(type(optimizer))
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    groups: list[Kept] = [{**group, **plain, **rates, "params": [blank]}]
    vars(double).update(vars(optimizer))
    vars(double).update(hooks, state=state, param_groups=groups)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _unwrap_step(type(optimizer).step)(double)
    beside = bool(group.get("fused") or group.get("capturable"))
    return {name: _to_blank(value, parameter, beside) for name, value in state[blank].items()}


def _unwrap_step(step: Callable[..., object]) -> Callable[..., object]:
    """Return the step function without its wrappers; they would count or record the step of the shadow optimizer."""
    while inner := getattr(step, "__wrapped__", None):
        step = inner
    return step


def _to_blank(value: object, parameter: torch.Tensor, beside: bool) -> object:
    if isinstance(value, dict):
        return {name: _to_blank(inner, parameter, beside) for name, inner in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    part = local_tensor(parameter)
    alone = value.dim() == 0 and not value.is_meta  # a count, which optimizers keep on the CPU
    here = value.device if alone and not beside else parameter.device
    spread = isinstance(parameter, DTensor) and value.shape == part.shape and not alone
    return BlankTensor(torch.empty_like(value, device="meta"), here, spread)


def shadow_optimizer(optimizer: Optimizer, kept: dict[torch.Tensor, Kept]) -> Optimizer:
    """Return a copy of the optimizer with its present state, and BlankTensors for the state that it will create."""
    double = object.__new__(type(optimizer))
    vars(double).update(vars(optimizer))
    state = {
        parameter: _map_blanks(own, partial(BlankTensor.stand_in, parameter=parameter))
        for parameter, own in kept.items()
    }
    for parameter, own in optimizer.state.items():
        state[parameter] = state.get(parameter, {}) | own
    vars(double)["state"] = state
    return double


def make_zeros(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros_like(like, device=device)


def allocate_state(parameter: torch.Tensor, kept: Kept, make: Make = make_zeros) -> Kept:
    """Return the state that an optimizer will create for a parameter, with real tensors in place of BlankTensors."""
    return _map_blanks(kept, lambda blank: blank.make_tensor(parameter, make))


def _map_blanks(kept: Kept, make: Callable[[BlankTensor], torch.Tensor]) -> Kept:
    found: Kept = {}
    for name, value in kept.items():
        if isinstance(value, dict):
            found[name] = _map_blanks(value, make)
        else:
            found[name] = make(value) if isinstance(value, BlankTensor) else value
    return found
