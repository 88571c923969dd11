"""A fixed reduction layout for DistributedDataParallel, so that a relaunched job sums gradients in the same order.

DDP starts with one bucket and, after its first backward pass, cuts new ones in the order in which gradients arrived. A
relaunch therefore reduces its first step in another layout than the run it continues, and sums of floats differ in the
last bits. Here the buckets are cut once, before the first step, in reverse order of registration: about the order in
which gradients arrive, so communication overlaps the backward pass as before.
"""

import torch
from torch.nn.parallel import DistributedDataParallel


def fix_buckets(model: object) -> None:
    """Cut DDP's buckets once and keep them; all ranks must call it together. Leaves other models alone."""
    ddp = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    if not isinstance(ddp, DistributedDataParallel) or not torch.distributed.is_initialized():
        return
    if ddp.find_unused_parameters and not ddp.static_graph:
        return  # then DDP never rebuilds
    old, logger = ddp.reducer, ddp.logger
    if logger and logger._get_ddp_logging_data().strs_map.get("comm_hook"):
        raise ValueError("a communication hook is registered already; call holdfast.attach before that")
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
