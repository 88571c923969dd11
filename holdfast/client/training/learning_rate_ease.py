"""Eases the learning rate of some steps when the controller asks for it, through PyTorch's optimizer hooks.

The rate is changed only while the optimizer makes its step. Schedulers and checkpoints see the original rate.
"""

import weakref
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from holdfast.wire.skip_ease_environment import parse_eases


class LearningRateEase:
    """Eases the listed steps, from its creation until `close`."""

    def __init__(self, told: str) -> None:
        self.at: int | None = None  # the step that the script asked about last: it is the one being made
        self.done: int | None = None  # newest step that was told or restored: the next one is being made
        self._eases = parse_eases(told)
        self._inside: weakref.ref[Optimizer] | None = None
        self._step = -1  # of what is eased now
        self._eased: list[tuple[dict[str, Any], Any, Any]] = []  # groups, their rates, and what we put there
        # The compiler must not look into them: it would trace them once and run them never.
        before, after = torch.compiler.disable(self._before_step), torch.compiler.disable(self._after_step)
        self._hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def factors_at(self, step: int) -> list[float]:
        return [factor for factor, (first, last) in self._eases if first <= step <= last]

    def _current_step(self) -> int:
        """Return the number of the step being made; -1 if it is unknown."""
        done = -1 if self.done is None else self.done
        if self.at is not None and self.at >= done:  # equal: it is told as done before the optimizer's step
            return self.at
        return -1 if self.done is None else done + 1

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        step = self._current_step()
        inside = self._inside() if self._inside else None
        if inside is not None and inside is not optimizer and step == self._step:
            return  # one that works through another hands it the eased rate
        self._restore_rates()  # the step before has raised
        factors = self.factors_at(step)
        if not factors:
            return
        self._inside, self._step = weakref.ref(optimizer), step
        for group in optimizer.param_groups:
            if isinstance(lr := group.get("lr"), int | float | torch.Tensor):
                group["lr"] = eased = _scale_rate(lr, factors)
                self._eased.append((group, lr, eased))

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._inside is not None and self._inside() is optimizer:
            self._restore_rates()

    def _restore_rates(self) -> None:
        for group, lr, eased in self._eased:
            if group.get("lr") is eased:  # else the step itself has set another
                group["lr"] = lr
        self._eased, self._inside = [], None


def _scale_rate(lr: Any, factors: list[float]) -> Any:
    # A tensor is not changed in place: a snapshot of it may be under way on another stream.
    for factor in factors:
        lr = lr * factor
    return lr
