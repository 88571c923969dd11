"""Checks a Checkpointer's arguments and makes of them an object that reads the state, and a checkpoint policy."""

import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.checkpoint.image_layout import Ranks
from holdfast.client.checkpointing.model_state import ModelState
from holdfast.client.checkpointing.optimizer_step_pre_hook import announce_steps, list_optimizers
from holdfast.client.checkpointing.user_built_state_dict import UserState
from holdfast.wire.rank_keeper_messages import CheckpointPolicy

StateDict = dict[str, Any]
OwnState = tuple[StateDict | Callable[[], StateDict] | None, Callable[[StateDict], object] | None]


def source_of(
    model: torch.nn.Module | None,
    optimizer: Any,
    own: OwnState,
    *,
    rank: int,
    group: Ranks,
) -> ModelState | UserState:
    """Return the object that reads and restores the state: of a model and its optimizers, or of the script's own state
    dict (`own`). Raise ValueError or TypeError if the arguments do not fit together."""
    state, load = own
    if state is not None:
        if model is not None:
            raise ValueError("give either model, or state_dict")
        return UserState(state, load, group, announce_steps(optimizer))
    if load is not None:
        raise ValueError("load= needs state_dict=")
    if model is None:
        raise ValueError("give something to save: model, or state_dict")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not a module")
    optimizers = list_optimizers(optimizer)
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer is a {type(one).__name__}, not a torch optimizer; see state_dict")
    _check_parameters(model, optimizers)
    return ModelState(model, optimizers, rank, group)


def _check_parameters(model: torch.nn.Module, optimizers: list[Optimizer]) -> None:
    known = set(model.parameters())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: make the Checkpointer once the model has memory")
    for optimizer in optimizers:
        strange = sum(tensor not in known for group in optimizer.param_groups for tensor in group["params"])
        if strange:
            raise ValueError(f"{type(optimizer).__name__} has {strange} parameters that are not in the model")


def storage_of(
    path: str | os.PathLike[str] | None, every: int | str | None, keep: int, keep_every: int | None
) -> CheckpointPolicy | None:
    """Return where and how often to make checkpoints; None without a path. Raises ValueError on wrong arguments."""
    if path is None:
        if every is not None:
            raise ValueError("every= makes checkpoints, so give path=")
        return None
    if keep < 0 or (keep_every or 0) < 0:
        raise ValueError("keep and keep_every must not be negative")
    url = os.fspath(path)
    url = url if "://" in url else os.path.abspath(url)
    steps, seconds = 0, 0.0
    match every:
        case None | "auto":
            pass
        case bool():
            raise ValueError('every must be a number of steps, a time like "30s", or "auto"')
        case int() if every > 0:
            steps = every
        case str() if found := re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", every):
            seconds = float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]]
        case _:
            raise ValueError('every must be a number of steps, a time like "30s", or "auto"')
    return CheckpointPolicy(url=url, every_steps=steps, every_s=seconds, keep=keep, keep_every=keep_every or 0)
