"""The private calls of torch by which a living process leaves its groups, and puts new ones in place of the old."""

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import CellType, FrameType, MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from holdfast.client.survival.nccl_proxy_wakeups import woken_proxies
from holdfast.client.training.fixed_ddp_buckets import fix_buckets
from holdfast.client.training.process_group_replay import GroupCall

_ABORT_TAG = 0x7FFF_0F5A  # of a message that nobody sends
_AT_ONCE = timedelta(milliseconds=1)
_LOOKS, _LOOK_S = 10, 0.02
_MULTIPLIED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def abort_groups() -> None:
    """Abort every collective of this process that is under way, in whatever thread. gloo has no abort: a receive with a
    short timeout takes its place, because a timeout closes all connections of the group."""
    groups = list(c10d._world.pg_map)
    for group in groups:
        _abort_gloo(group)
    if any(_has_nccl(group) for group in groups):
        with woken_proxies():
            c10d._abort_process_group()


def _abort_gloo(group: Any) -> None:
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return
    if not isinstance(backend, c10d.ProcessGroupGloo):
        return
    nothing = torch.zeros(1)
    for peer in range(backend.size()):
        if peer == backend.rank():
            continue
        try:  # one from a dead peer fails at once, and closes only that connection
            backend.recv([nothing], peer, _ABORT_TAG).wait(_AT_ONCE)  # type: ignore[attr-defined]
        except RuntimeError as e:
            if "timed out" in str(e).lower():
                return


def _has_nccl(group: Any) -> bool:
    try:
        return dist.is_nccl_available() and isinstance(group._get_backend(torch.device("cuda")), c10d.ProcessGroupNCCL)
    except RuntimeError:
        return False


def await_gpus(model: torch.nn.Module | None, patience_s: float) -> str:
    """Wait until the GPUs of the model, or otherwise the current GPU, have finished all queued work. Return the reason
    if this fails or takes longer than `patience_s`, else ""."""
    if not torch.cuda.is_initialized():
        return ""
    failed: list[str] = []
    used = {one.device.index for one in model.parameters() if one.device.type == "cuda"} if model is not None else set()
    devices = sorted(used or {torch.cuda.current_device()})

    def wait() -> None:
        try:
            for device in devices:
                torch.cuda.synchronize(device)
        except RuntimeError as e:  # a device-side assert: nothing can be done with this context any more
            failed.append(f"its GPU failed: {str(e).partition(chr(10))[0]}")

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(patience_s)
    if waiting.is_alive():
        return f"its GPU does not end what it does, {patience_s:g} s after the abort"
    return "".join(failed)


def warm_gpu(model: torch.nn.Module | None) -> None:
    """Make CUDA load what the first step and the first snapshot of a model on a GPU need: compute a product of matrices
    and its gradient, and pin a little memory. Draws no random numbers."""
    first = next(iter(model.parameters()), None) if model is not None else None
    if first is None or first.device.type != "cuda" or first.dtype not in _MULTIPLIED:
        return
    square = torch.ones(64, 64, device=first.device, dtype=first.dtype, requires_grad=True)
    (square @ square).sum().backward()
    torch.zeros(1, pin_memory=True)
    torch.cuda.synchronize(first.device)


@contextmanager
def unsaved_buffers(model: torch.nn.Module | None) -> Iterator[None]:
    """At the end of this block, restore the model's buffers that are in no state dict."""
    saved = set(model.state_dict()) if model is not None else set[str]()
    named = dict(model.named_buffers()) if model is not None else {}
    before = {buffer: buffer.detach().clone() for name, buffer in named.items() if name not in saved}
    yield
    with torch.no_grad():
        for buffer, content in before.items():
            buffer.copy_(content)


def forget_groups() -> None:
    """Forget all groups after an abort. New groups then get the names of the old ones, in the same order."""
    if dist.is_initialized():
        dist.destroy_process_group()


class GroupHolders:
    """Finds the dicts, lists and closures of Python code that hold these process groups, to replace the groups."""

    def __init__(self, groups: list[Any]) -> None:
        self.unknown: list[str] = []  # what holds a group where it cannot be replaced, in words
        self._places: list[tuple[Any, Any, Any]] = []  # container, key, group
        own = {id(groups), id(self.__dict__), id(self._places), *map(id, vars(c10d).values())}  # torch's own tables
        for holder in gc.get_referrers(*groups):
            if id(holder) in own or isinstance(holder, (FrameType, GroupCall, type(c10d._world))):
                continue
            named = vars(holder) if hasattr(holder, "__dict__") and not isinstance(holder, dict) else holder
            found = [(named, key, group) for group in groups for key in self._keys_of(named, group)]
            if not found:
                self.unknown.append(f"{type(holder).__module__}.{type(holder).__qualname__}")
            self._places += found

    def _keys_of(self, holder: Any, group: Any) -> Iterator[Any]:
        match holder:
            case dict() | MappingProxyType():
                yield from [key for key, value in holder.items() if value is group]
            case list():
                yield from [index for index, value in enumerate(holder) if value is group]
            case CellType() if holder.cell_contents is group:
                yield None

    def replace_groups(self, new: dict[Any, Any]) -> None:
        """Put each new group in the places that still hold the old one; `new` maps old groups to new ones."""
        for holder, key, old in self._places:
            if isinstance(holder, CellType):
                holder.cell_contents = new[old]
            elif holder[key] is old:
                holder[key] = new[old]
        self._places = [(holder, key, new[old]) for holder, key, old in self._places]


def find_holders(groups: list[Any]) -> GroupHolders:
    """Return the holders of these groups. A tuple cannot be changed, but it may exist only while another thread makes a
    call. So if tuples are found, wait a moment and look again."""
    holders = GroupHolders(groups)
    for _ in range(_LOOKS):
        if "builtins.tuple" not in holders.unknown:
            break
        time.sleep(_LOOK_S)
        holders = GroupHolders(groups)
    return holders


def bind_model(model: Any) -> None:
    """Make DDP and FSDP2 use the new groups, after these were put into their attributes. Drop the gradients and other
    state of an interrupted step. All ranks must call this together if the model contains DDP."""
    for parameter in model.parameters():
        parameter.grad = None  # of the step that was left; or a view of the buckets of DDP's old reducer
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            _bind_ddp(module)
        elif is_fsdp(module):
            state = module._get_fsdp_state()
            if state._is_root:
                state._reset_iter_state()


def has_ddp(model: torch.nn.Module | None) -> bool:
    return model is not None and any(isinstance(module, DistributedDataParallel) for module in model.modules())


def is_fsdp(module: Any) -> bool:
    """Return whether FSDP2 shards this module. Does not import FSDP2, which would take a second."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def has_own_sums(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP sums gradients by a communication hook, one of torch's own in C++ included. A new reducer
    would not have it."""
    if getattr(ddp, "_comm_hooks", None):
        return True
    told = ddp.logger._get_ddp_logging_data().strs_map if ddp.logger is not None else {}
    return bool(told.get("comm_hook"))


def find_fsdp_communication(module: Any) -> str:
    """Return what FSDP2 communicates by in this module, if that is not torch's usual way; "" if it is."""
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        ways = [getattr(group, name, None) for name in ("_all_gather_comm", "_reduce_scatter_comm")]
        if any("SymmMem" in type(one).__name__ for one in ways):
            return "symmetric memory"
        if any(one is not None and not type(one).__module__.startswith("torch.") for one in ways):
            return "a way of its own"
        if getattr(group, "_all_reduce_hook", None) is not None:
            return "a hook of its own"
    return ""


def can_leave_fsdp_step(module: Any) -> bool:
    """Return whether this torch can end a step of FSDP2 in its middle."""
    return hasattr(module._get_fsdp_state(), "_reset_iter_state")


def uses_symmetric_memory(model: torch.nn.Module | None) -> bool:
    """Return whether this process has memory that its peers map: it would belong to groups that are gone."""
    torch_memory = sys.modules.get("torch.distributed._symmetric_memory")
    if torch_memory is None:
        return False
    if any(getattr(torch_memory, name, None) for name in ("_group_name_to_store", "_group_name_to_workspace_tensor")):
        return True
    is_mapped = getattr(torch_memory, "is_symm_mem_tensor", lambda tensor: False)
    tensors = [*model.parameters(), *model.buffers()] if model is not None else []
    return any(is_mapped(tensor) for tensor in tensors if tensor.is_cuda)


def _bind_ddp(ddp: DistributedDataParallel) -> None:
    """Give DDP a new reducer for its new group. Survivors and new ranks get the same buckets."""
    ddp.reducer._remove_autograd_hooks()
    ddp.logger = None
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    fix_buckets(ddp)
