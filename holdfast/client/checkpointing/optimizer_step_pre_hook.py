"""Calls a function right before each step of an optimizer, torch's own or any other."""

import functools
import types
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class StepAnnouncement:
    """Calls a function before every step of the optimizers that it follows."""

    def __init__(self) -> None:
        self._call: Callable[[], None] = do_nothing

    def call_before_steps(self, call: Callable[[], None]) -> None:
        """Set the function to call before each step, in place of the earlier one."""
        self._call = call

    def follow(self, optimizer: Any) -> None:
        """Announce this optimizer's steps: through a hook if it is torch's, otherwise by wrapping its method `step`."""
        if isinstance(optimizer, Optimizer):
            optimizer.register_step_pre_hook(lambda *_: self._call())
            return
        step = optimizer.step

        @functools.wraps(step)
        def announced_step(_: Any, *args: Any, **kwargs: Any) -> Any:
            self._call()
            return step(*args, **kwargs)

        try:
            optimizer.step = types.MethodType(announced_step, optimizer)  # a method, as it was
        except AttributeError:
            name = type(optimizer).__name__
            raise TypeError(f"the step of a {name} cannot be followed; call before_step() before it") from None


def announce_steps(optimizer: Any) -> StepAnnouncement:
    """Return a StepAnnouncement for one optimizer or several. Raise TypeError if one has no method `step`."""
    found = StepAnnouncement()
    for one in list_optimizers(optimizer):
        if not callable(getattr(one, "step", None)):
            raise TypeError(f"optimizer is a {type(one).__name__}, which has no method step")
        found.follow(one)
    return found


def list_optimizers(optimizer: Any) -> list[Any]:
    """Return the argument as a list: it may be one optimizer, several or None."""
    if optimizer is None:
        return []
    return [optimizer] if hasattr(optimizer, "step") else list(optimizer)


def do_nothing() -> None: ...
