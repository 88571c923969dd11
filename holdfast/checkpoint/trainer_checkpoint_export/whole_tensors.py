"""What a checkpoint of a trainer holds as whole named tensors, each made when it is written."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from holdfast.checkpoint.trainer_checkpoint_export.kept_pickle import NotUnderstoodError
from holdfast.checkpoint.trainer_checkpoint_export.zero_partitions import cut_shares, join_whole
from holdfast.checkpoint.trainer_checkpoint_export.zero_reader import WEIGHTS, ParameterGroup, ZeroCheckpoint, ZeroSlice

MODEL, OPTIMIZER = "model", "optimizer"
_STEP = "step"


class LaterTensor(NamedTuple):
    """A tensor that is not in memory yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class WholeState(NamedTuple):
    """Tensors and plain values, under the names that torch's `get_state_dict` gives them."""

    step: int
    model: dict[str, LaterTensor]
    kept: dict[str, dict[str, LaterTensor]]  # by the optimizer, of each parameter
    groups: list[dict[str, Any]]  # of the optimizer: names of parameters, learning rates and the like
    left_out: list[str]
    unclear: str = ""  # why what the optimizer keeps cannot be told by parameter

    def tensors(self) -> dict[str, LaterTensor]:
        """Return all tensors by the names that torch.distributed.checkpoint gives them."""
        found = {f"{MODEL}.{name}": tensor for name, tensor in self.model.items()}
        for name, kinds in self.kept.items():
            found |= {f"{OPTIMIZER}.state.{name}.{kind}": tensor for kind, tensor in kinds.items()}
        return found


def make_whole(checkpoint: ZeroCheckpoint) -> WholeState:
    """Return what a checkpoint of ZeRO holds, the model with its master weights."""
    if len(checkpoint.slices) > 1:
        raise NotUnderstoodError(
            "mp_rank_01_model_states.pt: how tensor parallel ranks have sliced the weights is not told; "
            "another number of data parallel ranks can be had (--ranks)"
        )
    one = checkpoint.slices[0]
    model, left_out = _frozen_and_buffers(one) if checkpoint.stage == 3 else _tensors_of_module(one)
    weights = {name: _whole(group, WEIGHTS, name) for group in one.groups for name in group.shapes}
    shared = one.models[0].get("shared_params") or {}
    aliases = {alias: weights[name] for alias, name in shared.items() if name in weights}
    kept = {name: _kept_of(group, name) for group in one.groups for name in group.shapes}
    groups = [{"params": [*group.shapes]} | _plain_values(group.options) for group in one.groups]
    step = one.models[0].get("global_steps")
    return WholeState(step if isinstance(step, int) else 0, model | weights | aliases, kept, groups, left_out)


def later(tensor: torch.Tensor) -> LaterTensor:
    """Return a tensor that is in a file, as it is there; each is made by itself, though the model may have it twice."""
    return LaterTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor.detach().clone())


def _whole(group: ParameterGroup, kind: str, name: str) -> LaterTensor:
    pieces, shape = group.values[kind][name], group.shapes[name]
    return LaterTensor(shape, pieces[0].dtype if pieces else torch.float32, lambda: join_whole(pieces, shape))


def _tensors_of_module(one: ZeroSlice) -> tuple[dict[str, LaterTensor], list[str]]:
    module = one.models[0]["module"]
    found = {str(name): later(value) for name, value in module.items() if isinstance(value, torch.Tensor)}
    return found, [f"{MODEL}.{name}" for name in module if str(name) not in found]


def _frozen_and_buffers(one: ZeroSlice) -> tuple[dict[str, LaterTensor], list[str]]:
    """Return what ZeRO 3 keeps besides: its ranks have empty tensors in the place of weights."""
    model = one.models[0]
    names = [name for name in model.get("buffer_names") or () if isinstance(model["module"].get(name), torch.Tensor)]
    found = {name: later(model["module"][name]) for name in names}
    for name, pieces in frozen_pieces(one).items():
        shape = tuple(model["frozen_param_shapes"][name])
        found[name] = LaterTensor(shape, pieces[0].dtype, partial(join_whole, pieces, shape))
    return found, []


def frozen_pieces(one: ZeroSlice) -> dict[str, list[torch.Tensor]]:
    """Return the weights that ZeRO 3 does not train, of which each rank has a share as well."""
    shapes = one.models[0].get("frozen_param_shapes") or {}
    fragments = [model.get("frozen_param_fragments") or {} for model in one.models]
    return {
        name: cut_shares([found[name].flatten() for found in fragments], {name: tuple(shape)}, name)[name]
        for name, shape in shapes.items()
        if all(name in found for found in fragments)
    }


def _kept_of(group: ParameterGroup, name: str) -> dict[str, LaterTensor]:
    kinds = {kind: _whole(group, kind, name) for kind in group.values if kind != WEIGHTS}
    step = group.shared.get(_STEP, group.options.get(_STEP))
    if isinstance(step, int | float | torch.Tensor):
        count = torch.tensor(float(step))
        kinds[_STEP] = LaterTensor((), count.dtype, lambda: count)
    return kinds


def _plain_values(options: dict[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None))
    return {
        key: value
        for key, value in options.items()
        if isinstance(value, plain)
        or (isinstance(value, list | tuple) and all(isinstance(one, plain) for one in value))
    }
