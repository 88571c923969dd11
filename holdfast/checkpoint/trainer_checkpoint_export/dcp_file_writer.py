"""Writes whole named tensors as a checkpoint of torch.distributed.checkpoint, one tensor in memory at a time."""

from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint import save as save_distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from holdfast.checkpoint.manifest import METADATA
from holdfast.checkpoint.trainer_checkpoint_export.whole_tensors import MODEL, OPTIMIZER, LaterTensor, WholeState


class _LaterPlanner(DefaultSavePlanner):
    """Makes each tensor when its turn to be written comes; the state holds its shape alone."""

    def __init__(self, tensors: dict[str, LaterTensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return self._tensors[write_item.index.fqn].make().contiguous()


def write_dcp(whole: WholeState, folder: str) -> tuple[str, ...]:
    """Write a state to a folder that is there, as `dcp.load` finds it under `{"model": ..., "optimizer": ...}` with the
    state dicts of torch's `get_state_dict`; return the names of the files, in the order to publish them in."""
    state: dict[str, Any] = {MODEL: {name: _blank(tensor) for name, tensor in whole.model.items()}}
    if whole.kept:
        kept = {
            name: {kind: _blank(tensor) for kind, tensor in kinds.items()}
            for name, kinds in whole.kept.items()
            if kinds
        }
        state[OPTIMIZER] = {"state": kept} | ({"param_groups": whole.groups} if whole.groups else {})
    state["step"] = whole.step
    planner = _LaterPlanner(whole.tensors())
    try:
        save_distributed(state, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    except CheckpointException as e:  # torch's wrapper, which no `except Exception` would catch
        raise next(iter(e.failures.values()))[0] from None
    return ("__0_0.distcp", METADATA)


def _blank(tensor: LaterTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
