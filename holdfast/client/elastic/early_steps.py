"""Optimizer steps that a worker makes in its layers before the vote on them, and takes back if the vote says no.

Before an early step the worker copies each layer's state, and adds up its bits. Until the vote, the layer does not
count as whole: only the vote makes the step, and a step that it has made is never taken back. A layer that was taken
back has the copied state, whose bits must add up to the same.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.client.elastic.layer_state import LayerUnit, UnitError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number


class StateCopy:
    """A copy of one layer's state, on the layer's device."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._numbers: dict[str, Any] = {}
        self._groups: list[dict[str, Any]] = []
        self._sums: dict[str, torch.Tensor] = {}
        self._lent = False  # the layer's optimizer has these very tensors

    @torch.no_grad()
    def take(self, unit: LayerUnit) -> None:
        """Copy a layer's state, into the memory of the copy before if it fits."""
        before = {} if self._lent else self._tensors
        self._tensors, self._numbers, self._sums, self._lent = {}, {}, {}, False
        for name, value in unit.list_state():
            if not isinstance(value, torch.Tensor):
                self._numbers[name] = copy.deepcopy(value)
                continue
            into = before.get(name)
            if into is None or (into.shape, into.dtype) != (value.shape, value.dtype):
                into = torch.empty_like(value)
            self._tensors[name] = into.copy_(value)
            self._sums[name] = sum_bits(value)
        self._groups = [copy.deepcopy(group) for group in unit.list_groups()]

    @torch.no_grad()
    def give_back(self, unit: LayerUnit) -> None:
        """Give a layer the copied state. Raises UnitError if its bits do not add up to what they did."""
        for name, tensor in unit.module.state_dict(keep_vars=True).items():
            tensor.copy_(self._tensors[f"module {name}"])
        self._lent = True
        unit.set_optimizer_state(self._tensors | self._numbers, self._groups)
        sums = {name: sum_bits(value) for name, value in unit.list_state() if isinstance(value, torch.Tensor)}
        if sums.keys() != self._sums.keys() or any(bool(sums[name] != self._sums[name]) for name in sums):
            raise UnitError(f"layer {unit.number} could not be taken back to step {unit.step}: its bits have changed")


class EarlySteps:
    """The early steps of one worker's layers."""

    def __init__(self) -> None:
        self._copies: dict[int, StateCopy] = {}  # by layer
        self._made: list[int] = []  # layers in which the step is made, or being made, and not yet voted
        self._last_stood = True  # else its gradients were scaled down, and the next ones may be as well

    def make(self, step: int, units: Mapping[int, LayerUnit], rate: float | None) -> None:
        """Make a step from the gradients in hand, unless the last step could not be made like that."""
        self._copies = {layer: one for layer, one in self._copies.items() if layer in units}
        for layer, unit in units.items() if self._last_stood else ():
            if unit.step == step - 1:
                self._copies.setdefault(layer, StateCopy()).take(unit)
                self._made.append(layer)
                unit.whole = False
                unit.run_optimizer(None, rate, keep=True)

    def settle(self, step: int, units: Mapping[int, LayerUnit], *, stands: bool) -> None:
        """After the vote: the step is made if it `stands`. Else it is taken back, and can be made otherwise."""
        if stands:
            while self._made:
                units[self._made[-1]].finish_step(step)
                self._made.pop()
        self.take_back(units)
        self._last_stood = stands

    def take_back(self, units: Mapping[int, LayerUnit]) -> list[int]:
        """Take back the step in all layers in which it was made without a vote. Return these layers."""
        taken = []
        while self._made:
            layer = self._made[-1]
            if not units[layer].whole:
                self._copies[layer].give_back(units[layer])
                units[layer].whole = True
                taken.append(layer)
            self._made.pop()
        return sorted(taken)


def sum_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits as whole numbers, on its device."""
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return numbers.detach().contiguous().view(_BITS[numbers.element_size()]).sum(dtype=torch.int64)
