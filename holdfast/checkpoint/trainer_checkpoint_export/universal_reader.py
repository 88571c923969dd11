"""Reads a Universal Checkpoint, as DeepSpeed's `ds_to_universal` writes it: each parameter whole, in its own files.

It has no count of ranks. To be written for a number of them, it is read into the form that `zero_reader` returns.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.trainer_checkpoint_export.kept_pickle import NotUnderstoodError, load_kept
from holdfast.checkpoint.trainer_checkpoint_export.zero_partitions import Shapes, undo_turns
from holdfast.checkpoint.trainer_checkpoint_export.zero_reader import (
    FLAT,
    STATES,
    WEIGHTS,
    ParameterGroup,
    ZeroCheckpoint,
    ZeroSlice,
    config_of,
    gaps_of,
    join_groups,
    options_of,
    plain_number,
    read_model,
    refuse_gaps,
    refuse_unknown,
    shapes_of,
)

OPTIMIZER = Path("zero") / "optimizer_state.pt"
_KINDS = (WEIGHTS, "exp_avg", "exp_avg_sq")  # ds_to_universal knows no others
_STEP = "step"


def is_universal(folder: Path) -> bool:
    return (folder / OPTIMIZER).is_file()


def read_universal(folder: Path) -> ZeroCheckpoint:
    """Read a Universal Checkpoint as if one rank had written it; NotUnderstoodError if it holds something else."""
    refuse_unknown(folder)
    told = load_kept(folder / OPTIMIZER)
    if not isinstance(told, dict):
        raise NotUnderstoodError(f"{OPTIMIZER} holds no state of an optimizer")
    stage = plain_number(told.get("zero_stage", 1))
    name = "zero_pp_rank_{}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    count = len([*folder.glob(name.format("*"))])
    if others := sorted(
        path.name for path in folder.glob("*mp_rank_*_model_states.pt") if "mp_rank_00" not in path.name
    ):
        raise NotUnderstoodError(f"{others[0]}: slices of tensor parallel ranks are not understood")
    if not count:
        raise NotUnderstoodError(f"{name.format(0)} is missing")
    models = [read_model(folder / name.format(rank)) for rank in range(count)]
    read = _read_stage_3 if stage == 3 else _read_stage_2
    return ZeroCheckpoint(3 if stage == 3 else 1, 1, _prefix_of(models[0]), [read(folder, models, told)])


def _prefix_of(model: Mapping[str, Any]) -> str:
    """Return what the optimizer's files of an engine with this configuration begin with."""
    config = model.get("ds_config")
    if not isinstance(config, dict):
        raise NotUnderstoodError("the model's file does not tell whether bf16 is enabled, as `ds_config` is no dict")
    told = config.get("bf16", config.get("bfloat16"))
    return "bf16_" if isinstance(told, dict) and told.get("enabled") else ""


def _read_group(folder: Path, shapes: Shapes) -> ParameterGroup:
    """Read the files of a group's parameters; all of them have made the same steps."""
    values: dict[str, dict[str, list[torch.Tensor]]] = {}
    steps = []
    for name, shape in shapes.items():
        for kind in _KINDS:
            values.setdefault(kind, {})[name] = [_read_values(folder / "zero" / name / f"{kind}.pt", shape)]
        if (path := folder / "zero" / name / f"{_STEP}.pt").exists():
            steps.append(load_kept(path))
    if steps and not all(float(step) == float(steps[0]) for step in steps):
        raise NotUnderstoodError("parameters of one group have made different numbers of steps")
    return ParameterGroup(dict(shapes), values, {_STEP: steps[0]} if steps else {}, {})


def _read_values(path: Path, shape: Sequence[int]) -> torch.Tensor:
    told = load_kept(path)
    found = told.get("param") if isinstance(told, dict) else told
    where = f"{path.parent.name}/{path.name}"
    if not isinstance(found, torch.Tensor) or found.numel() != math.prod(shape):
        raise NotUnderstoodError(f"{where} does not hold the values of a parameter of the shape {tuple(shape)}")
    return found.flatten()


def _read_stage_2(folder: Path, models: list[dict[str, Any]], told: dict[str, Any]) -> ZeroSlice:
    model = models[0]
    is_in_turns = "zero_stage" in told and bool(config_of(model).get("round_robin_gradients"))
    counts = told.get("partition_count")
    ranks = max(counts, default=1) if isinstance(counts, list) else 1
    groups = []
    for n, shapes in enumerate(shapes_of(model)):
        names = undo_turns([*shapes], ranks) if is_in_turns else [*shapes]
        group = _read_group(folder, {name: shapes[name] for name in names})
        groups.append(group._replace(options=options_of(told, [n], n), gaps=gaps_of(told, n, shapes)))
    if is_in_turns:
        refuse_gaps(groups, model)
    kept = {
        "state": {n: dict.fromkeys((*group.shared, *_KINDS[1:])) for n, group in enumerate(groups)},
        "param_groups": told["param_groups"],
    }
    states = {key: value for key, value in told.items() if key != "param_groups"}
    states |= {FLAT: [], "base_optimizer_state": kept, "param_slice_mappings": []}
    return ZeroSlice(groups, models, _file_of(model, states), is_in_turns)


def _read_stage_3(folder: Path, models: list[dict[str, Any]], told: dict[str, Any]) -> ZeroSlice:
    kept = told.get(STATES)
    if not isinstance(kept, dict) or not isinstance(kept.get("state"), dict):
        raise NotUnderstoodError(f"{OPTIMIZER} holds no state of an optimizer under `{STATES}`")
    pieces = []
    for n, shapes in enumerate(shapes_of(models[0])):
        shared = {
            kind: value
            for kind, value in kept["state"].get(n, {}).items()
            if not (isinstance(value, torch.Tensor) and value.dim())
        }
        pieces.append(_read_group(folder, shapes)._replace(shared=shared))
    states = {key: value for key, value in told.items() if key != "param_groups"}
    return ZeroSlice(join_groups(kept, pieces), models, _file_of(models[0], states))


def _file_of(model: Mapping[str, Any], states: dict[str, Any]) -> dict[str, Any]:
    """Return what a file of the optimizer holds beside its states."""
    return {STATES: states} | {key: model[key] for key in ("ds_config", "ds_version") if key in model}
