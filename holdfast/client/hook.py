"""What scripts that import nothing let us know: PyTorch tells of every optimizer step, and of the process group."""

import functools
import sys
import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from holdfast.client import origin
from holdfast.client.progress import Progress, here


class Count:
    """Steps of the first optimizer in this generation; others (a discriminator's, say) do not count."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._first: weakref.ref[Optimizer] | None = None
        self._steps = 0

    def see(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        first = self._first() if self._first else None
        if first is None:
            self._first = weakref.ref(optimizer)
        elif first is not optimizer:
            return
        self._steps += 1
        if self._steps == 1:
            self._progress.goes_on_from(origin.of(optimizer, self._progress.reads))
        self._progress.count(self._steps)


def install(progress: Progress) -> None:
    """Count from here on, until the script tells its steps itself.

    The hook is never taken out again: that might happen while PyTorch goes through its hooks. The compiler must not
    look into it: it would trace the count once and run it never.
    """
    register_optimizer_step_post_hook(torch.compiler.disable(Count(progress).see))
    if "torch.distributed.distributed_c10d" in sys.modules:
        tell_groups()


def tell_groups() -> None:
    """Have `init_process_group` tell when it is done, wherever PyTorch itself keeps it; once is enough."""
    from torch.distributed import distributed_c10d as c10d

    plain = c10d.init_process_group
    if getattr(plain, "tells_holdfast", False):
        return

    @functools.wraps(plain)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        made = plain(*args, **kwargs)
        here.grouped()
        return made

    vars(init_process_group)["tells_holdfast"] = True
    for name in ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh"):
        module = sys.modules.get(name)
        if module is not None and vars(module).get("init_process_group") is plain:
            vars(module)["init_process_group"] = init_process_group
