"""What the optimizer is about to do to the weights, in one number per step, for the rules that look at updates.

For Adam and its kin: the largest over all tensors of RMS(lr m / (sqrt(v) + eps)), with the moments as this step made
them. That reads both moments once: about half of what the step itself costs, so it is done only where asked for.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_EPS = 1e-8


class Watching:
    """The newest numbers of one optimizer, on its device: nobody waits for them here."""

    def __init__(self, optimizer: Optimizer, model: object = None) -> None:
        self.update: torch.Tensor | None = None
        self.norm: torch.Tensor | None = None
        self._own: list[torch.Tensor] = []
        self._optimizer = optimizer
        optimizer.register_step_post_hook(torch.compiler.disable(self._see))
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(model.process_group, torch.compiler.disable(self._reduce))

    @property
    def own_norm(self) -> torch.Tensor | None:
        """Of this rank's own gradient of the last backward pass."""
        own, self._own = self._own, []
        return torch.stack(own).sum().sqrt() if own else None

    @torch.no_grad()
    def _see(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        sizes: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if "exp_avg_sq" in optimizer.state.get(p, ())]
            gradients += [p.grad for p in group["params"] if p.grad is not None]
            if not params:
                continue
            roots = torch._foreach_sqrt([optimizer.state[p]["exp_avg_sq"] for p in params])
            torch._foreach_add_(roots, _EPS)
            found = torch._foreach_div([optimizer.state[p]["exp_avg"] for p in params], roots)
            lengths = torch.stack(torch._foreach_norm(found))
            counts = torch.tensor([math.sqrt(p.numel()) for p in params], device=lengths.device, dtype=lengths.dtype)
            sizes.append(lengths / counts * group["lr"])
        self.update = torch.cat(sizes).max() if sizes else None
        norms = torch._foreach_norm(gradients) if gradients else ()
        self.norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else None

    def _reduce(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's own reduction, and what went into it from here."""
        self._own.append(torch.linalg.vector_norm(bucket.buffer(), dtype=torch.float32).square())
        buffer = bucket.buffer().div_(group.size())
        done: torch.futures.Future[torch.Tensor] = (
            dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda fut: fut.value()[0])
        )
        return done
