"""Saves and restores the state of this rank's torch optimizers, and the part of the master weights that they update.

Trainers with an optimizer of their own (ZeRO, Megatron) divide the master weights among the ranks. Each rank updates
its part with a torch optimizer. The trainer computes the model's weights from these parts. An optimizer has no state
before its first step. So the Checkpointer is made after this step, unless there is a state to restore.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.checkpoint.state_image import StateError
from holdfast.client.checkpointing.checkpointer import Checkpointer
from holdfast.client.checkpointing.optimizer_shapes import allocate_state, foresee_state
from holdfast.client.checkpointing.state_preview import peek_state

Values = dict[str, Any]
_PLAIN = (int, float, bool, str, tuple, list, type(None))


class ShardCheckpointer:
    """Saves and restores the parameters and states of some optimizers, and the buffers of a module."""

    def __init__(self, optimizers: Sequence[Optimizer], module: torch.nn.Module, extra: Values, **more: Any) -> None:
        """Make a checkpointer for these optimizers and the buffers of `module`. Each rank saves its own buffers and
        `extra`. `more` has the options of a Checkpointer, among them `path`."""
        self._optimizers = optimizers
        self._weights = set(module.parameters())
        self._more = more
        self._extra = {"groups": GroupValues(optimizers), "buffers": ModuleBuffers(module), **extra}
        self._checkpointer: Checkpointer | None = None

    def restore(self, gather: Callable[[], object]) -> int:
        """Restore the newest state, then call `gather`, which computes the model's weights from it. Return the state's
        step, or 0 if there is none. All ranks must call this."""
        if not peek_state(self._more["path"]).step:
            return 0
        for optimizer in self._optimizers:
            if (kept := foresee_state(optimizer, self._is_trained)) is None:
                raise StateError(f"the state of a {type(optimizer).__name__} cannot be made before its first step")
            for parameter, own in kept.items():
                optimizer.state[parameter] = allocate_state(parameter, own) | optimizer.state[parameter]
        self._checkpointer = self._make_checkpointer()
        step = self._checkpointer.restore()
        gather()
        return step

    def save(self, step: int) -> None:
        """Take a snapshot of the step that was just made."""
        self._checkpointer = self._checkpointer or self._make_checkpointer()
        self._checkpointer.save(step)

    def close(self) -> None:
        """Make the newest snapshot a checkpoint, as a script's end does."""
        if self._checkpointer:
            self._checkpointer.close()

    def _is_trained(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is trained: a weight of the model that is not frozen, or a master weight. Master
        weights are trained even if they do not require a gradient, because trainers copy gradients to them."""
        return parameter.requires_grad or parameter not in self._weights

    def _make_checkpointer(self) -> Checkpointer:
        return Checkpointer(state_dict=self._read, extra=self._extra, **self._more)

    def _read(self) -> Values:
        """Return the live tensors and the optimizers' own state dicts, so that values can be restored into them."""
        return {
            f"{n}.{g}.{p}": {"weights": parameter.detach(), "state": optimizer.state.get(parameter, {})}
            for n, optimizer in enumerate(self._optimizers)
            for g, group in enumerate(optimizer.param_groups)
            for p, parameter in enumerate(group["params"])
        }


class GroupValues:
    """The plain values of parameter groups, such as learning rates and step counts. The number of state entries of each
    optimizer is saved too. Loading fails if the saved numbers differ from those of the optimizers."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def state_dict(self) -> Values:
        groups = {str(n): _plain_values(group) for n, group in enumerate(self._groups)}
        return {"kept": self._count_kept(), **groups}

    def load_state_dict(self, state: Values) -> None:
        if state["kept"] != self._count_kept():  # the rest would be lost without a word
            told = f"{self._count_kept()} states of parameters, and {state['kept']} were saved"
            raise StateError(f"the optimizers will hold {told}")
        for n, group in enumerate(self._groups):
            group.update(state[str(n)])

    def _count_kept(self) -> list[int]:
        return [sum(map(len, optimizer.state.values())) for optimizer in self._optimizers]


class ModuleBuffers:
    """The buffers that a module saves, such as running means of this rank's batches."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def state_dict(self) -> Values:
        """Return the live buffers by their names in the module; state dicts of wrappers may name them differently."""
        return {
            f"{path}.{name}" if path else name: buffer
            for path, part in self._module.named_modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and name not in part._non_persistent_buffers_set
        }

    def load_state_dict(self, state: Values) -> None:
        own = self.state_dict()
        if missing := sorted(own.keys() - state.keys()):  # it would keep its first value without a word
            raise StateError(f"the model's buffer {missing[0]} was not saved")
        for name, buffer in own.items():
            buffer.copy_(state[name])


class PlainFields:
    """The plain values of any object, such as a loss scaler's scale and how many steps it has kept that scale."""

    def __init__(self, thing: object, names: Sequence[str] = ()) -> None:
        self._thing, self._names = thing, names

    def state_dict(self) -> Values:
        fields = vars(self._thing)
        return _plain_values({name: fields[name] for name in self._names} if self._names else fields)

    def load_state_dict(self, state: Values) -> None:
        vars(self._thing).update(state)


def _plain_values(fields: Values) -> Values:
    return {name: value for name, value in fields.items() if name != "params" and isinstance(value, _PLAIN)}
