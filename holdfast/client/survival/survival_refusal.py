"""Finds the reasons why a script's ranks cannot survive, such as objects that cannot be bound to new process groups."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.client.survival.torch_groups import (
    can_leave_fsdp_step,
    find_fsdp_communication,
    has_own_sums,
    is_fsdp,
    uses_symmetric_memory,
)
from holdfast.client.training.process_group_replay import GROUP_CALLS, GroupCall

_FIXED = {"rank", "world_size", "store"}
_PLAIN_ARGUMENTS = 3  # of init_process_group: backend, init_method and timeout


def find_refusal(model: torch.nn.Module | None, unknown: list[str], groups: list[Any]) -> str:
    """Return in words why this script's ranks cannot survive the failure of another rank; "" if they can."""
    if RankWorld.count:
        return "a Checkpointer was made before the function that survives; make it inside"
    if unknown:
        return f"{', '.join(sorted(set(unknown)))} holds a process group where it cannot be replaced"
    backends = {backend for group in groups for backend in _list_backends(group)} - {"gloo", "fake", "nccl"}
    if backends:
        return f"process groups of {', '.join(sorted(backends))} are not made again, only those of gloo and NCCL"
    if not GROUP_CALLS.lenient and any("nccl" in _list_backends(group) for group in groups):
        return (
            "torch would end this process when another one fails, as its groups were made where nothing named "
            "holdfast.survive; call init_process_group from the code that does, or from code that this calls"
        )
    if uses_symmetric_memory(model):
        return "it uses symmetric memory, which belongs to its process groups"
    for module in model.modules() if model is not None else ():
        if why := _refuse_module(module):
            return why
    devices = {parameter.device.type for parameter in model.parameters()} if model is not None else set[str]()
    if devices - {"cpu", "cuda"}:
        return f"its model is on {', '.join(sorted(devices))}, and only processors and CUDA are known to go on"
    return ""


def find_fixed_size(model: torch.nn.Module | None, made: list[GroupCall]) -> str:
    """Return why this script's groups or model work with one number of ranks only; "" if they work with any."""
    if _FIXED & made[0].kwargs.keys() or len(made[0].args) > _PLAIN_ARGUMENTS:
        return "init_process_group was told the rank, the world size or a store; leave these to the environment"
    if any(call.args or call.kwargs.get("ranks") is not None for call in made[1:]):
        return "it has process groups of some ranks"
    modules = list(model.modules()) if model is not None else []
    if any(is_fsdp(module) for module in modules):
        return "FSDP divides the model among them"
    if any(isinstance(parameter, DTensor) for module in modules for parameter in module.parameters(recurse=False)):
        return "its model is divided among them"
    return ""


def _list_backends(group: Any) -> set[str]:
    """Return the backends of a group. A group made without naming a backend has several, for different devices."""
    named: str = dist.get_backend_config(group)
    return {part.rpartition(":")[2] for part in named.split(",")}


def _refuse_module(module: Any) -> str:
    if isinstance(module, torch.nn.SyncBatchNorm):
        return "it has a SyncBatchNorm"
    if isinstance(module, DistributedDataParallel) and has_own_sums(module):
        return "its DistributedDataParallel has a communication hook"
    if type(module).__name__ == "FullyShardedDataParallel":
        return "it uses FSDP1"
    if is_fsdp(module):
        return _refuse_fsdp(module)
    return ""


def _refuse_fsdp(module: Any) -> str:
    if own := find_fsdp_communication(module):
        return f"its FSDP communicates by {own}"
    if not can_leave_fsdp_step(module):
        return f"FSDP2 of torch {torch.__version__} cannot leave a step before its end"
    return ""
