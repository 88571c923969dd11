"""A fixed reduction layout for DistributedDataParallel, so that a relaunched job sums gradients in the same order.

DDP starts with one bucket and, after its first backward pass, cuts new ones in the order in which gradients arrived. A
relaunch therefore reduces its first step in another layout than the run it continues, and sums of floats differ in the
last bits. Here the buckets are cut once, before the first step, in reverse order of registration: about the order in
which gradients arrive, so communication overlaps the backward pass as before.
"""

import gc
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel


def fix_saved_model(model: torch.nn.Module | None, gather_all: Callable[[int], list[int]]) -> str:
    """Fix the buckets of every DDP model in a model that a Checkpointer saves, or of the only one around it. Return "",
    or why they stay as torch cuts them. All ranks must call it together."""
    if model is None or not torch.distributed.is_initialized():
        return ""
    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if not found:
        known = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
        around = [one for one in known if model in (one.module, getattr(one.module, "_orig_mod", None))]
        found = around if set(gather_all(len(around))) == {1} else []
    try:
        for ddp in found:
            fix_buckets(ddp)
    except (ValueError, RuntimeError, AttributeError, TypeError) as e:  # of a torch that does this in another way
        return f"a resumed run may differ in the last bits: {e}"
    return ""


def fix_buckets(model: object) -> None:
    """Cut DDP's buckets once and keep them; all ranks must call it together. Leaves other models alone."""
    ddp = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    if not isinstance(ddp, DistributedDataParallel) or not torch.distributed.is_initialized():
        return
    if ddp.find_unused_parameters and not ddp.static_graph:
        return  # then DDP never rebuilds
    if ddp._has_rebuilt_buckets or ddp._use_python_reducer:
        return  # fixed already, or steps were made; or torch.compile sums the gradients
    old, logger = ddp.reducer, ddp.logger
    if logger and logger._get_ddp_logging_data().strs_map.get("comm_hook"):
        raise ValueError(
            "a communication hook is registered already; call holdfast.attach or make the Checkpointer before that"
        )
    ok = False
    try:
        _cut_buckets(ddp)
        ok = True
    finally:
        unused = old if ok else ddp.reducer
        if not ok:
            ddp.reducer, ddp.logger = old, logger
        if unused is not ddp.reducer:
            unused._remove_autograd_hooks()


def _cut_buckets(ddp: DistributedDataParallel) -> None:
    # The one order in which a reducer can be told to cut is that of its parameters, so it gets them reversed.
    parameters, sparse = ddp._build_params_for_reducer()
    parameters, sparse = parameters[::-1], sparse[::-1]
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
    ddp.reducer._push_all_rebuilt_params()
    if not ddp.reducer._rebuild_buckets():
        raise RuntimeError("the reducer did not accept the layout")
    ddp._has_rebuilt_buckets = True
