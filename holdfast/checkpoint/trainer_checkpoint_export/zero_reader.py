"""Reads a checkpoint that DeepSpeed has written with ZeRO: what the data parallel ranks held, as whole parameters."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from holdfast.checkpoint.trainer_checkpoint_export.kept_pickle import KeptObject, NotUnderstoodError, load_kept
from holdfast.checkpoint.trainer_checkpoint_export.zero_partitions import (
    Pieces,
    Shapes,
    cut_group,
    cut_shares,
    undo_turns,
)

WEIGHTS = "fp32"  # as DeepSpeed names master weights among the kinds of values that a parameter has
STATES = "optimizer_state_dict"
FLAT, FLAT_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_OPTIMIZER = re.compile(r"((?:bf16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_ASSUMED = "round_robin_gradients is taken as off: the checkpoint tells its configuration by a path alone"
_UNKNOWN = (
    ("*expert*_states.pt", "experts that are split over ranks are not understood"),
    ("expp_rank_*", "experts that are split over ranks are not understood"),
    ("layer_*-model_*", "stages of a pipeline are not understood"),
    ("offloaded_tensors", "states that were offloaded to a disk are not understood"),
)


class ParameterGroup(NamedTuple):
    """The parameters of one group of the optimizer, and what it keeps of them."""

    shapes: dict[str, tuple[int, ...]]  # in the optimizer's order
    values: dict[str, Pieces]  # by their kind: the master weights, and the optimizer's averages
    shared: dict[str, Any]  # of the optimizer's state: what is one for all of them, such as the count of steps
    options: dict[str, Any]  # the learning rate, and the like
    gaps: Mapping[str, int] = MappingProxyType({})  # zeros behind a parameter, under `parameter_alignment`


class ZeroSlice(NamedTuple):
    """What the data parallel ranks held together; ranks of tensor parallel groups hold slices of the model."""

    groups: list[ParameterGroup]
    models: list[dict[str, Any]]  # what the files of the model hold: one, or with ZeRO 3 one for each rank
    optimizer: dict[str, Any]  # what the first rank's file of the optimizer holds
    is_in_turns: bool = False  # as `round_robin_gradients` puts the parameters
    assumed: str = ""  # what is not told, and what is believed instead


class ZeroCheckpoint(NamedTuple):
    """A checkpoint of ZeRO."""

    stage: int
    ranks: int  # data parallel ones
    prefix: str  # of the optimizer's files
    slices: list[ZeroSlice]


def read_zero(folder: Path) -> ZeroCheckpoint:
    """Read a folder with the files that DeepSpeed's engine writes; NotUnderstoodError if it holds something else."""
    refuse_unknown(folder)
    found = {path.name: named for path in folder.iterdir() if (named := _OPTIMIZER.fullmatch(path.name))}
    if not found:
        raise NotUnderstoodError(f"{folder.name} holds no parts of ZeRO: any number of ranks can load it as it is")
    prefixes = {named[1] for named in found.values()}
    if len(prefixes) > 1:
        raise NotUnderstoodError(f"{folder.name} holds parts of two checkpoints: {min(found)} and {max(found)}")
    prefix = prefixes.pop()
    ranks, slices = (1 + max(int(named[part]) for named in found.values()) for part in (2, 3))
    if ranks * slices != len(found):
        raise NotUnderstoodError(f"{folder.name} has {len(found)} parts of the optimizer, not {ranks} x {slices}")
    optimizers = [
        [
            read_states(folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_{part:02d}_optim_states.pt")
            for rank in range(ranks)
        ]
        for part in range(slices)
    ]
    stage = stage_of(optimizers[0][0])
    read_slice = _read_slice_3 if stage == 3 else _read_slice
    return ZeroCheckpoint(
        stage, ranks, prefix, [read_slice(folder, part, told) for part, told in enumerate(optimizers)]
    )


def refuse_unknown(folder: Path) -> None:
    for pattern, why in _UNKNOWN:
        if name := min((path.name for path in folder.glob(pattern)), default=""):
            raise NotUnderstoodError(f"{name}: {why}")


def read_states(path: Path) -> dict[str, Any]:
    """Read a file of the optimizer; what DeepSpeed keeps is under `STATES`."""
    told = load_kept(path)
    if not (isinstance(told, dict) and isinstance(told.get(STATES), dict)):
        raise NotUnderstoodError(f"{path.name} holds no state of an optimizer of ZeRO")
    if "ds_zero_partition_groups" in told[STATES]:
        raise NotUnderstoodError(f"{path.name}: experts that are split over ranks are not understood")
    return told


def read_model(path: Path) -> dict[str, Any]:
    """Read a file of the model."""
    told = load_kept(path)
    if not (isinstance(told, dict) and isinstance(told.get("module"), dict)):
        raise NotUnderstoodError(f"{path.name} holds no state of a model")
    if not isinstance(shapes := told.get("param_shapes"), list) or not all(isinstance(one, dict) for one in shapes):
        raise NotUnderstoodError(f"{path.name} does not tell what the parameters are, under `param_shapes`")
    return told


def stage_of(told: Mapping[str, Any]) -> int:
    """Return the stage of ZeRO, which DeepSpeed's BF16_Optimizer does not tell, as it is always the first."""
    stage = plain_number(told[STATES].get("zero_stage", 1))
    if stage not in (1, 2, 3):
        raise NotUnderstoodError(f"ZeRO has no stage {told[STATES].get('zero_stage')!r}")
    return stage


def plain_number(value: object) -> object:
    """Return a member of an enumeration as its number."""
    return value.made_of[0] if isinstance(value, KeptObject) and value.made_of else value


def config_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of DeepSpeed's configuration under `zero_optimization`."""
    config = model.get("ds_config")
    found = config.get("zero_optimization") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def shapes_of(model: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Return the parameters of each group (with ZeRO 3, of each part of a group) in the order of their values."""
    return [{name: _shape_of(name, shape) for name, shape in group.items()} for group in model["param_shapes"]]


def _shape_of(name: object, shape: object) -> tuple[int, ...]:
    is_shape = isinstance(shape, list | tuple) and all(isinstance(n, int) and n >= 0 for n in shape)
    if not (is_shape and isinstance(name, str)):
        raise NotUnderstoodError(f"the shape of {name} is not understood")
    return tuple(shape)  # type: ignore[arg-type]


# --- ZeRO 1 and 2 --------------------------------------------------------------------------------------------------


def _read_slice(folder: Path, part: int, optimizers: Sequence[dict[str, Any]]) -> ZeroSlice:
    model = read_model(folder / f"mp_rank_{part:02d}_model_states.pt")
    told = [one[STATES] for one in optimizers]
    kept = [one.get("base_optimizer_state") for one in told]
    if not all(isinstance(one, dict) and isinstance(one.get("state"), dict) for one in kept):
        raise NotUnderstoodError(f"{folder.name}: an optimizer's state under `elastic_checkpoint` is not understood")
    groups = []
    for n, shapes in enumerate(shapes_of(model)):
        gaps = gaps_of(told[0], n, shapes)
        cut = partial(_cut_kind, partial(cut_group, shapes=shapes, gaps=gaps), f"group {n}")
        values = {WEIGHTS: cut([_tensor_at(one, FLAT, n) for one in told], WEIGHTS)}
        more, shared = _cut_states([one["state"].get(n, {}) for one in kept], cut)
        groups.append(ParameterGroup(shapes, values | more, shared, options_of(kept[0], [n], n), gaps))
    orders = [_optimizer_order(group.shapes, told, n, model) for n, group in enumerate(groups)]
    is_in_turns = _tells_of_turns(model, told[0]) or any(
        order != [*group.shapes] for order, group in zip(orders, groups, strict=True)
    )
    if is_in_turns:
        refuse_gaps(groups, model)
    groups = [
        group._replace(shapes={name: group.shapes[name] for name in order})
        for order, group in zip(orders, groups, strict=True)
    ]
    shows_order = any(undo_turns([*group.shapes], len(told)) != [*group.shapes] for group in groups)
    is_told = isinstance(model.get("ds_config"), dict) or "zero_stage" not in told[0]
    return ZeroSlice(groups, [model], optimizers[0], is_in_turns, "" if is_told or shows_order else _ASSUMED)


def _tells_of_turns(model: Mapping[str, Any], told: Mapping[str, Any]) -> bool:
    return "zero_stage" in told and bool(config_of(model).get("round_robin_gradients"))


def _optimizer_order(shapes: Shapes, told: Sequence[Mapping[str, Any]], n: int, model: Mapping[str, Any]) -> list[str]:
    """Return a group's parameters as the optimizer was given them, which the ranks' maps of their parts show."""
    as_saved = [*shapes]
    undone = undo_turns(as_saved, len(told))
    maps = [one["param_slice_mappings"][n] for one in told if len(one.get("param_slice_mappings") or ()) > n]
    mapped = [*dict.fromkeys(name for one in maps for name in one)]
    if not mapped:
        return undone if _tells_of_turns(model, told[0]) else as_saved
    for order in (as_saved, undone):
        if [name for name in order if 0 not in shapes[name]] == mapped:
            return order
    raise NotUnderstoodError(f"group {n}: the order of its parameters is not understood")


def gaps_of(told: Mapping[str, Any], n: int, shapes: Shapes) -> dict[str, int]:
    """Return how many zeros follow each parameter of a group, which newer versions of DeepSpeed tell."""
    found = told.get("param_alignment_paddings")
    if found is None:
        return {}
    if not (isinstance(found, list) and n < len(found) and len(found[n]) == len(shapes)):
        raise NotUnderstoodError(f"`param_alignment_paddings` does not tell of the parameters of group {n}")
    return {name: gap for name, gap in zip(shapes, found[n], strict=True) if gap}


def refuse_gaps(groups: Sequence[ParameterGroup], model: Mapping[str, Any]) -> None:
    """With parameters in another order, gaps are others; of what size is not told."""
    if config_of(model).get("parameter_alignment") or any(group.gaps for group in groups):
        raise NotUnderstoodError("round_robin_gradients together with parameter_alignment is not understood")


def _cut_kind(cut: Callable[..., Pieces], where: str, parts: Sequence[torch.Tensor], kind: str) -> Pieces:
    return cut(parts, where=f"{kind} of {where}")


def _tensor_at(told: Mapping[str, Any], name: str, place: int) -> torch.Tensor:
    found = told.get(name)
    if not isinstance(found, list) or place >= len(found) or not isinstance(found[place], torch.Tensor):
        raise NotUnderstoodError(f"there are no weights under `{name}`, or not of group {place}")
    tensor: torch.Tensor = found[place]
    return tensor


def _cut_states(
    states: Sequence[dict[str, Any]], cut: Callable[[Sequence[torch.Tensor], str], Pieces]
) -> tuple[dict[str, Pieces], dict[str, Any]]:
    """Return what the optimizer keeps of each parameter, and what it keeps once; all ranks must agree on the latter."""
    values: dict[str, Pieces] = {}
    shared: dict[str, Any] = {}
    for kind in dict.fromkeys(kind for state in states for kind in state):
        if not all(kind in state for state in states):
            raise NotUnderstoodError(f"not every rank has {kind} in the optimizer's state")
        found = [state[kind] for state in states]
        if all(isinstance(one, torch.Tensor) and one.dim() for one in found):
            values[kind] = cut(found, kind)
        elif all(_is_same(one, found[0]) for one in found):
            shared[kind] = found[0]
        else:
            raise NotUnderstoodError(f"ranks do not agree on {kind}, which the optimizer keeps once")
    return values, shared


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return bool(torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)


def options_of(kept: Mapping[str, Any], ids: Sequence[int], n: int) -> dict[str, Any]:
    found = kept.get("param_groups")
    if not isinstance(found, list) or n >= len(found) or not isinstance(found[n], dict):
        raise NotUnderstoodError(f"the optimizer's state does not tell of group {n}")
    if found[n].get("params") != ids:
        raise NotUnderstoodError(f"group {n} of the optimizer's state is not made of the parts {ids}")
    if found[n].get("moe"):
        raise NotUnderstoodError(f"group {n}: experts that are split over ranks are not understood")
    return {key: value for key, value in found[n].items() if key != "params"}


# --- ZeRO 3 --------------------------------------------------------------------------------------------------------


def _read_slice_3(folder: Path, part: int, optimizers: Sequence[dict[str, Any]]) -> ZeroSlice:
    name = "zero_pp_rank_{}_mp_rank_{:02d}_model_states.pt"
    models = [read_model(folder / name.format(rank, part)) for rank in range(len(optimizers))]
    told = [one[STATES] for one in optimizers]
    kept = [one.get(STATES) for one in told]
    if not all(isinstance(one, dict) and isinstance(one.get("state"), dict) for one in kept):
        raise NotUnderstoodError(f"{folder.name}: there is no state of the optimizer under `{STATES}`")
    pieces = []
    for n, shapes in enumerate(shapes_of(models[0])):
        cut = partial(_cut_kind, partial(cut_shares, shapes=shapes), f"part {n} of a group")
        values = {WEIGHTS: cut([_tensor_at(one, FLAT_3, n) for one in told], WEIGHTS)}
        more, shared = _cut_states([one["state"].get(n, {}) for one in kept], cut)
        pieces.append(ParameterGroup(shapes, values | more, shared, {}))
    return ZeroSlice(join_groups(kept[0], pieces), models, optimizers[0])


def join_groups(kept: Mapping[str, Any], pieces: Sequence[ParameterGroup]) -> list[ParameterGroup]:
    """ZeRO 3 divides a group of many values; here are the groups as the optimizer was given them."""
    groups = []
    at = 0
    for n, told in enumerate(kept.get("param_groups") or ()):
        ids = told.get("params") if isinstance(told, dict) else None
        if not isinstance(ids, list) or not ids or ids != [*range(at, at + len(ids))] or at + len(ids) > len(pieces):
            raise NotUnderstoodError(f"group {n} of the optimizer's state is not made of parts in their order")
        parts = pieces[at : at + len(ids)]
        if any(not _has_same_shared(one, parts[0]) for one in parts):
            raise NotUnderstoodError(f"the optimizer keeps different values for parts of group {n}")
        shapes = {name: shape for one in parts for name, shape in one.shapes.items()}
        values = {
            kind: {name: found for one in parts for name, found in one.values[kind].items()} for kind in parts[0].values
        }
        groups.append(ParameterGroup(shapes, values, parts[0].shared, options_of(kept, ids, n)))
        at += len(ids)
    if at != len(pieces):
        raise NotUnderstoodError(f"the optimizer's state tells of {at} parts of groups, and there are {len(pieces)}")
    return groups


def _has_same_shared(one: ParameterGroup, other: ParameterGroup) -> bool:
    keys = one.shared.keys() == other.shared.keys() and one.values.keys() == other.values.keys()
    return keys and all(_is_same(value, other.shared[key]) for key, value in one.shared.items())
