"""Measures each step's update of the weights as one number, for the rules that judge updates.

For Adam-like optimizers this is the largest RMS(lr m / (sqrt(v) + eps)) over all tensors, with the moments after the
step. Reading both moments costs about half as much as the step itself, so it is done only on request.

A single rank may measure, so this module adds no collective, in which all ranks would have to take part. Of a
distributed tensor (FSDP2, HSDP, tensor parallel) a rank measures its own shard. The gradient norm is the one that
torch's clipping computes before it clips; without clipping it is the norm of the rank's shard.
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

_EPS = 1e-8
_CLIP = "_clip_grads_with_norm_"  # what every way of torch's to clip by the norm ends in
_CLIP_TOO = "clip_grads_with_norm_"  # its name for scripts


class UpdateWatch:
    """The newest update size and gradient norm of one optimizer, kept on its device so that nothing waits."""

    def __init__(self, optimizer: Optimizer, model: object = None) -> None:
        self.update: torch.Tensor | None = None
        self.norm: torch.Tensor | None = None
        self._own: list[torch.Tensor] = []
        self._optimizer = optimizer
        self._clipped: dict[tuple[int, ...], torch.Tensor] = {}  # norm before it, of these parameters
        self._hook: RemovableHandle | None = optimizer.register_step_post_hook(torch.compiler.disable(self._after_step))
        _see_clipping(self)
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(model.process_group, torch.compiler.disable(self._reduce_bucket))

    @property
    def own_norm(self) -> torch.Tensor | None:
        """Return the norm of this rank's own gradient in the last backward pass, or None; reading resets it."""
        own, self._own = self._own, []
        return torch.stack(own).sum().sqrt() if own else None

    def on_clip(self, parameters: list[torch.Tensor], norm: torch.Tensor) -> None:
        """Record the norm of these parameters' gradients. Called before torch's clipping changes the gradients."""
        trained = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        ours = tuple(id(p) for p in parameters if id(p) in trained)
        if ours and self._hook is not None:
            self._clipped[ours] = norm.detach().clone()

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        try:
            self._measure_update(optimizer)
        except Exception as e:  # the script's own step is around us
            self._stop_watching(e)

    def _stop_watching(self, error: Exception) -> None:
        self.update = self.norm = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            print(f"holdfast: the optimizer is no longer watched: {error!r}", file=sys.stderr)

    @torch.no_grad()
    def _measure_update(self, optimizer: Optimizer) -> None:
        sizes: list[torch.Tensor] = []
        clipped, self._clipped = self._clipped, {}
        known = {parameter for some in clipped for parameter in some}
        rest: list[torch.Tensor] = []
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if "exp_avg_sq" in optimizer.state.get(p, ())]
            rest += [_local_part(p.grad) for p in group["params"] if p.grad is not None and id(p) not in known]
            if not params:
                continue
            roots = torch._foreach_sqrt([_local_part(optimizer.state[p]["exp_avg_sq"]) for p in params])
            torch._foreach_add_(roots, _EPS)
            found = torch._foreach_div([_local_part(optimizer.state[p]["exp_avg"]) for p in params], roots)
            lengths = torch.stack(torch._foreach_norm(found))
            roots_of = [
                math.sqrt(max(1, _local_part(p).numel())) for p in params
            ]  # a rank may have nothing of a tensor
            counts = torch.tensor(roots_of, device=lengths.device, dtype=lengths.dtype)
            sizes.append(lengths / counts * group["lr"])
        self.update = torch.cat(sizes).max() if sizes else None
        norms = [*clipped.values(), *(torch._foreach_norm(rest) if rest else ())]
        self.norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else None

    def _reduce_bucket(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP communication hook: record the norm of this rank's own gradients, then average as DDP does."""
        try:
            self._own.append(torch.linalg.vector_norm(bucket.buffer(), dtype=torch.float32).square())
        except Exception as e:  # the script's own backward pass is around us
            self._stop_watching(e)
        buffer = bucket.buffer().div_(group.size())
        done: torch.futures.Future[torch.Tensor] = (
            dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda fut: fut.value()[0])
        )
        return done


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _see_clipping(watching: UpdateWatch) -> None:
    """Wrap torch's internal clipping function to report gradient norms to `watching`; do nothing if torch has none.

    The internal function is replaced because a script may already have imported torch's public ones by name.
    """
    clip: Callable[..., None] | None = getattr(clip_grad, _CLIP, None)
    if clip is None:
        return
    watcher = weakref.ref(watching)

    def seen(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        total_norm: torch.Tensor,
        foreach: bool | None = None,
    ) -> None:
        if torch.compiler.is_compiling():  # nothing of ours may break a graph in two
            return clip(parameters, max_norm, total_norm, foreach)
        several = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if (told := watcher()) is not None:
            try:
                total_norm = _full_norm(total_norm)
                told.on_clip(several, _local_part(total_norm))
            except Exception as e:
                told._stop_watching(e)
        return clip(several, max_norm, total_norm, foreach)

    setattr(clip_grad, _CLIP, seen)
    if getattr(torch.nn.utils, _CLIP_TOO, None) is clip:
        setattr(torch.nn.utils, _CLIP_TOO, seen)


def _full_norm(norm: torch.Tensor) -> torch.Tensor:
    """Return the norm over all shards. If ranks hold partial norms, reduce them now, as torch would do next."""
    if not isinstance(norm, DTensor) or all(placement.is_replicate() for placement in norm.placements):
        return norm
    return norm.redistribute(placements=[Replicate()] * norm.device_mesh.ndim)
