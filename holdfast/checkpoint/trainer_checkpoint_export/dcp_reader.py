"""Reads a checkpoint of torch.distributed.checkpoint, which Megatron's and TorchTitan's are, as whole named tensors."""

import io
import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from holdfast.checkpoint import dcp
from holdfast.checkpoint.foreign_file_faults import read_small
from holdfast.checkpoint.manifest import METADATA
from holdfast.checkpoint.state_image import StateError
from holdfast.checkpoint.trainer_checkpoint_export.kept_pickle import NotUnderstoodError, load_kept
from holdfast.checkpoint.trainer_checkpoint_export.whole_tensors import MODEL, OPTIMIZER, LaterTensor, WholeState
from holdfast.linux.regular_files import open_file

_MOST_METADATA_BYTES = 2 << 30
_STATE = re.compile(r"(?:chained_\d+\.)?optim(?:izer)?\.")  # what names of an optimizer's tensors begin with
_BUCKETS = ".gbuf_idx_"  # in names of what Megatron's distributed optimizer holds, in an order that is not told
_MASTERS = ("fp32_param", "param")  # Megatron's names for master weights
_COMMON = "common.pt"


def is_dcp(folder: Path) -> bool:
    return (folder / METADATA).is_file()


def read_dcp(folder: Path) -> WholeState:
    """Return what the folder holds; NotUnderstoodError if it cannot be read."""
    try:
        metadata = dcp.decode_metadata(read_small(folder / METADATA, _MOST_METADATA_BYTES))
    except StateError as e:
        raise NotUnderstoodError(f"{METADATA} cannot be read ({e})") from None
    tensors: dict[str, LaterTensor] = {}
    left_out: list[str] = []
    for name, known in sorted(metadata.state_dict_metadata.items()):
        if isinstance(known, TensorStorageMetadata):
            tensors[name] = _later(folder, metadata, name, known)
        else:
            left_out.append(name)
    model = {name.removeprefix(f"{MODEL}."): tensor for name, tensor in tensors.items() if not _STATE.match(name)}
    kept, unclear = _sort_states({name: tensor for name, tensor in tensors.items() if _STATE.match(name)}, model)
    weights = {name: kinds.pop(kind) for name, kinds in kept.items() for kind in _MASTERS if kind in kinds}
    if kept and (count := _count_steps(folder / _COMMON)):
        kept = {name: {"step": count} | kinds for name, kinds in kept.items()}
    return WholeState(0, model | weights, kept, [], left_out, unclear)


def _later(folder: Path, metadata: Metadata, name: str, known: TensorStorageMetadata) -> LaterTensor:
    shape, kind = tuple(known.size), known.properties.dtype
    held = sum(math.prod(chunk.sizes) for chunk in known.chunks)
    if held < math.prod(shape):
        raise NotUnderstoodError(f"{METADATA} tells where {held} of the {math.prod(shape)} values of {name} are")

    def make() -> torch.Tensor:
        whole = torch.empty(shape, dtype=kind)
        for chunk in known.chunks:
            place = tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place] = _read_record(folder, metadata, MetadataIndex(name, chunk.offsets))
        return whole

    return LaterTensor(shape, kind, make)


def _read_record(folder: Path, metadata: Metadata, index: MetadataIndex) -> torch.Tensor:
    place = metadata.storage_data.get(index)
    path = Path(str(getattr(place, "relative_path", "")))
    if place is None or path.is_absolute() or ".." in path.parts:
        raise NotUnderstoodError(f"{METADATA} does not tell where in this folder {index.fqn} is")
    if getattr(place, "transform_descriptors", None):
        raise NotUnderstoodError(f"{path}: {index.fqn} is compressed, which is not understood")
    with open_file(folder / path) as file:
        file.seek(place.offset)
        record = io.BytesIO(file.read(place.length))
    found = torch.load(record, map_location="cpu", weights_only=True)
    if not isinstance(found, torch.Tensor):
        raise NotUnderstoodError(f"{path} does not hold the values of {index.fqn}")
    return found


def _sort_states(
    states: Mapping[str, LaterTensor], model: Mapping[str, LaterTensor]
) -> tuple[dict[str, dict[str, LaterTensor]], str]:
    """Return an optimizer's tensors by parameter and kind; and why some could not be sorted, if any."""
    kept: dict[str, dict[str, LaterTensor]] = {}
    for name, tensor in states.items():
        head, _, rest = name[_STATE.match(name).end() :].partition(".")  # type: ignore[union-attr]
        kind, _, parameter = rest.partition(".")  # as Megatron names them
        if parameter not in model:
            parameter, _, kind = rest.rpartition(".")  # as torch does
        if _BUCKETS in name:
            return {}, f"{name}: which values are whose is known to Megatron alone, unless it saves fully_reshardable"
        if head != "state" or parameter not in model:
            return {}, f"{name}: of which parameter this is, is not understood"
        kept.setdefault(parameter, {})[kind] = tensor
    return kept, ""


def _count_steps(path: Path) -> LaterTensor | None:
    """Return how many steps Megatron's optimizer has made, if its groups agree on it."""
    if not path.exists():
        return None
    told = load_kept(path)
    for name in (OPTIMIZER, OPTIMIZER, "param_groups"):
        told = told.get(name) if isinstance(told, dict) else None
    found = [one.get("step") for one in told if isinstance(one, dict)] if isinstance(told, list) else []
    steps = {float(step) for step in found if isinstance(step, int | float | torch.Tensor)}
    if len(steps) != 1:
        return None
    count = torch.tensor(steps.pop())
    return LaterTensor((), count.dtype, lambda: count)
