"""Writes a checkpoint as DeepSpeed's engine writes it with ZeRO, for another number of data parallel ranks."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.checkpoint.trainer_checkpoint_export.kept_pickle import (
    KeptObject,
    NotUnderstoodError,
    save_kept,
    stand_for,
)
from holdfast.checkpoint.trainer_checkpoint_export.whole_tensors import frozen_pieces
from holdfast.checkpoint.trainer_checkpoint_export.zero_partitions import (
    Pieces,
    Shapes,
    group_share,
    in_turns,
    join_share,
    owned_values,
    parameter_share,
    place_parameters,
)
from holdfast.checkpoint.trainer_checkpoint_export.zero_reader import (
    FLAT,
    FLAT_3,
    STATES,
    WEIGHTS,
    ParameterGroup,
    ZeroCheckpoint,
    ZeroSlice,
    config_of,
    shapes_of,
)

_SUB_GROUP_VALUES = 1_000_000_000  # as many of a rank make a part of a group under ZeRO 3, if the configuration is mute
_ADDRESS = stand_for("deepspeed.utils.tensor_fragment", "fragment_address")


def write_zero(checkpoint: ZeroCheckpoint, ranks: int, folder: str) -> None:
    """Write the files of all ranks to a folder that is there; one rank's values are in memory at a time."""
    for part, one in enumerate(checkpoint.slices):
        if checkpoint.stage == 3:
            files = _files_of_stage_3(one, ranks, part, checkpoint.prefix)
        else:
            files = _files_of_stage_2(one, ranks, part, checkpoint.prefix)
        for name, content in files:
            save_kept(content, f"{folder}/{name}")


def _optimizer_name(prefix: str, rank: int, part: int) -> str:
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_{part:02d}_optim_states.pt"


def _count_like(old: object, ranks: int) -> object:
    """Return the number of ranks in the form that this optimizer tells it in."""
    return [ranks] * len(old) if isinstance(old, list) else ranks


# --- ZeRO 1 and 2 --------------------------------------------------------------------------------------------------


def _files_of_stage_2(one: ZeroSlice, ranks: int, part: int, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    orders = [in_turns([*group.shapes], ranks) if one.is_in_turns else [*group.shapes] for group in one.groups]
    for rank in range(ranks):
        shares = [_share_of(group, order, rank, ranks) for group, order in zip(one.groups, orders, strict=True)]
        yield _optimizer_name(prefix, rank, part), one.optimizer | {STATES: _states_of(one, shares, ranks)}
    model = one.models[0]
    shapes = [
        OrderedDict((name, torch.Size(group.shapes[name])) for name in order)
        for group, order in zip(one.groups, orders, strict=True)
    ]
    yield f"mp_rank_{part:02d}_model_states.pt", model | {"dp_world_size": ranks, "param_shapes": shapes}


class _Share(NamedTuple):
    """What a rank holds of a group."""

    values: dict[str, torch.Tensor]  # by kind, filled up
    filling: int  # values
    filling_at_end: int  # of all ranks, told by the last one
    addresses: "OrderedDict[str, KeptObject]"


def _share_of(group: ParameterGroup, order: Sequence[str], rank: int, ranks: int) -> _Share:
    places, total = place_parameters({name: group.shapes[name] for name in order}, group.gaps)
    share = group_share(total, ranks)
    values = {
        kind: join_share([*_spread(group, pieces, order)], rank * share, share) for kind, pieces in group.values.items()
    }
    filling = share - owned_values(total, share, rank)
    at_end = share * ranks - total if rank == ranks - 1 else 0
    if not group.gaps:  # then DeepSpeed's addresses are of the optimizer's order, even if the values have another
        places, _ = place_parameters(group.shapes, {})
    return _Share(values, filling, at_end, _addresses_of(places, rank * share, share))


def _spread(group: ParameterGroup, pieces: Pieces, order: Sequence[str]) -> Iterator[torch.Tensor]:
    """Yield a group's values one after the other, with the gaps between parameters."""
    kind = next((piece.dtype for name in order for piece in pieces[name]), torch.float32)
    for name in order:
        yield from pieces[name]
        if gap := group.gaps.get(name):
            yield torch.zeros(gap, dtype=kind)


def _addresses_of(places: Mapping[str, tuple[int, int]], start: int, share: int) -> "OrderedDict[str, KeptObject]":
    """Return where in a rank's share each parameter is, as DeepSpeed says it."""
    found: OrderedDict[str, KeptObject] = OrderedDict()
    for name, (begin, end) in places.items():
        first, last = max(begin, start), min(end, start + share)
        if first < last:
            found[name] = _ADDRESS.__new__(_ADDRESS)
            found[name].state = {"numel": last - first, "start": first - start}
    return found


def _states_of(one: ZeroSlice, shares: Sequence[_Share], ranks: int) -> dict[str, Any]:
    old = one.optimizer[STATES]
    kept = old["base_optimizer_state"]
    states = {
        n: _entry_of(group, share.values, kept["state"][n])
        for n, (group, share) in enumerate(zip(one.groups, shares, strict=True))
        if n in kept["state"]
    }
    is_lean = "zero_stage" in old  # DeepSpeed's BF16_Optimizer keeps what fills up
    weights = [
        share.values[WEIGHTS][: -share.filling or None] if is_lean else share.values[WEIGHTS] for share in shares
    ]
    new = {
        "base_optimizer_state": kept | {"state": states},
        FLAT: [tensor.clone() for tensor in weights],
        "group_paddings": [share.filling if is_lean else share.filling_at_end for share in shares],
        "partition_count": _count_like(old.get("partition_count"), ranks),
        "param_slice_mappings": [share.addresses for share in shares],
    }
    told: dict[str, Any] = old | {key: value for key, value in new.items() if key in old}
    return told


def _entry_of(group: ParameterGroup, values: Mapping[str, torch.Tensor], old: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the optimizer keeps of a group, its kinds in their old order. Counts of steps are tensors of their
    own: torch would add up one that several entries have."""
    shared = {kind: value.clone() if isinstance(value, torch.Tensor) else value for kind, value in group.shared.items()}
    return {kind: values[kind] if kind in values else shared[kind] for kind in old}


# --- ZeRO 3 --------------------------------------------------------------------------------------------------------


def _files_of_stage_3(one: ZeroSlice, ranks: int, part: int, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    most = _most_values(one)
    before = [names for group in one.groups for names in _divide_group(group.shapes, len(one.models), most)]
    if before != [[*shapes] for shapes in shapes_of(one.models[0])]:
        raise NotUnderstoodError("how groups are divided (sub_group_size) is not understood")
    divided = [_divide_group(group.shapes, ranks, most) for group in one.groups]
    for rank in range(ranks):
        yield _optimizer_name(prefix, rank, part), one.optimizer | {STATES: _states_of_3(one, divided, rank, ranks)}
    frozen = frozen_pieces(one)
    shapes = [
        OrderedDict((name, torch.Size(group.shapes[name])) for name in names)
        for group, parts in zip(one.groups, divided, strict=True)
        for names in parts
    ]
    for rank in range(ranks):
        model = one.models[rank % len(one.models)] | {"dp_world_size": ranks, "param_shapes": shapes}
        if frozen:
            model["frozen_param_fragments"] = OrderedDict(
                (name, _share_of_one(pieces, model["frozen_param_shapes"][name], rank, ranks))
                for name, pieces in frozen.items()
            )
        yield f"zero_pp_rank_{rank}_mp_rank_{part:02d}_model_states.pt", model


def _most_values(one: ZeroSlice) -> int:
    told = config_of(one.models[0]).get("sub_group_size")
    return int(told) if isinstance(told, int | float) and told > 0 else _SUB_GROUP_VALUES


def _divide_group(shapes: Shapes, ranks: int, most: int) -> list[list[str]]:
    """Divide a group as DeepSpeed does: a part ends with the parameter that makes a rank hold `most` of it."""
    parts: list[list[str]] = [[]]
    values = 0
    for name, shape in shapes.items():
        if values >= most:
            parts.append([])
            values = 0
        parts[-1].append(name)
        values += parameter_share(shape, ranks)
    return parts


def _states_of_3(one: ZeroSlice, divided: Sequence[Sequence[Sequence[str]]], rank: int, ranks: int) -> dict[str, Any]:
    old = one.optimizer[STATES]
    kept = old[STATES]
    states: dict[int, dict[str, Any]] = {}
    weights: list[torch.Tensor] = []
    groups: list[dict[str, Any]] = []
    for group, parts, told in zip(one.groups, divided, kept["param_groups"], strict=True):
        groups.append(told | {"params": [*range(len(weights), len(weights) + len(parts))]})
        for names in parts:
            values = {kind: _share_of_part(group, kind, names, rank, ranks) for kind in group.values}
            if kept["state"]:
                first = kept["state"][told["params"][0]]
                states[len(weights)] = _entry_of(group, values, first)
            weights.append(values[WEIGHTS])
    new = {STATES: kept | {"state": states, "param_groups": groups}, FLAT_3: weights}
    told_all: dict[str, Any] = old | new | {"partition_count": _count_like(old.get("partition_count"), ranks)}
    return told_all


def _share_of_part(group: ParameterGroup, kind: str, names: Sequence[str], rank: int, ranks: int) -> torch.Tensor:
    return torch.cat([_share_of_one(group.values[kind][name], group.shapes[name], rank, ranks) for name in names])


def _share_of_one(pieces: Sequence[torch.Tensor], shape: Sequence[int], rank: int, ranks: int) -> torch.Tensor:
    share = parameter_share(shape, ranks)
    return join_share(pieces, rank * share, share)
