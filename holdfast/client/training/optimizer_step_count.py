"""Counts optimizer steps through PyTorch hooks, without any call by the script."""

import functools
import os
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from holdfast.client.training import inferred_resume_step, process_group_lifecycle
from holdfast.client.training.parameter_count import ParameterCount
from holdfast.client.training.process_group_replay import GROUP_CALLS
from holdfast.client.training.progress import RankProgress
from holdfast.wire.progress_environment import MADE_UP, REHEARSAL

_MAKES_STATE = "_init_optim_state"  # of torch.distributed.checkpoint.state_dict
_FRAMES = 16  # from our hook up to it, profilers and compilers included


class StepCount:
    """Counts the steps of the generation's first optimizer, but not of others, such as a discriminator's."""

    def __init__(self, progress: RankProgress) -> None:
        self._progress = progress
        self._first: weakref.ref[Optimizer] | None = None
        self._steps = self._life = 0
        self._made_up = 0  # the optimizer's own count after a step that torch made only to create its state
        self._parameters = ParameterCount()
        self._updated = False  # an optimizer has made a step since this was last looked at
        self._skipped = 0  # updates in a row that a GradScaler has skipped

    def on_scaled_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Call a GradScaler's step, which may skip the optimizer's. Count steps skipped for non-finite gradients."""
        self._updated = False
        result = step()
        first = self._first() if self._first else None
        if not self._updated and (first is None or first is optimizer):
            self._skipped += 1
            self._progress.note_skipped_updates(self._skipped)
        return result

    def on_optimizer_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if GROUP_CALLS.steps_aside:
            return
        self._updated = True
        if (parameters := self._parameters.add_optimizer(optimizer)) is not None:
            self._progress.note_parameters(parameters)
        if self._life != self._progress.life:
            self._life, self._steps, self._first = self._progress.life, 0, None
        first = self._first() if self._first else None
        if first is None:
            self._first = weakref.ref(optimizer)
        elif first is not optimizer:
            return
        if _is_made_up(optimizer):
            self._made_up = inferred_resume_step.steps_before(optimizer, None) + 1
            return
        self._steps += 1
        if self._skipped:
            self._skipped = 0
            self._progress.note_skipped_updates(0)
        if self._steps == 1:
            if os.environ.get(REHEARSAL):
                raise RuntimeError("this rank was to join others in the function that survives, but steps outside")
            before = inferred_resume_step.steps_before(optimizer, self._progress.reads, self._made_up)
            # A state that was loaded counts the step that was made up before it was saved.
            made_up = os.environ.get(MADE_UP) == "1" if before > 0 else self._made_up > 0
            self._progress.goes_on_from(before - made_up if before > 0 else before, made_up=made_up)
        self._progress.count_steps(self._steps)


def _is_made_up(optimizer: Optimizer) -> bool:
    """Return whether torch makes the current step only to create the optimizer's state, for a save or a restore.

    Such a step has a learning rate of 0. The first step of a warm-up may have one too; the caller tells them apart.
    """
    if any(_is_rate(group.get("lr")) for group in optimizer.param_groups):
        return False
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None or frame.f_code.co_name == _MAKES_STATE:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == _MAKES_STATE


def _is_rate(rate: Any) -> bool:
    """Return whether the learning rate is not 0. A CUDA tensor is not read and counts as not 0."""
    return bool(getattr(rate, "is_cuda", False) or rate)


def install_hooks(progress: RankProgress) -> None:
    """Count optimizer steps from now on, until the script reports its steps itself.

    The hook is never removed, because PyTorch may be iterating over its hooks. The compiler must not trace the hook:
    it would trace the count once and never run it.
    """
    count = StepCount(progress)

    def see(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        count.on_optimizer_step(optimizer, args, kwargs)

    register_optimizer_step_post_hook(_untraced()(see))
    _watch_scalers(count)
    if "torch.distributed.distributed_c10d" in sys.modules:
        process_group_lifecycle.report_groups(progress.on_group, progress.on_group_teardown)


def _watch_scalers(count: StepCount) -> None:
    """Wrap GradScaler.step to count the updates that it skips. Optimizer hooks are not called for these."""
    plain = GradScaler.step

    @functools.wraps(plain)
    def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return count.on_scaled_step(optimizer, lambda: plain(self, optimizer, *args, **kwargs))

    GradScaler.step = _untraced()(step)  # type: ignore[method-assign]


def _untraced() -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the decorator that keeps the compiler out of a function, without importing the compiler now."""
    at_once: Callable[[Callable[..., None]], Callable[..., None]] = torch.compiler.disable
    return at_once if "torch._dynamo" in sys.modules else getattr(torch, "_disable_dynamo", at_once)
