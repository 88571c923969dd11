"""For loops on Megatron-Core: make a `HeldMegatron` after `get_megatron_optimizer`; call its `save` after every step.

Each rank saves only what its torch optimizers hold: with Megatron's distributed optimizer, a part of the master weights
and of their state. After a restore, Megatron computes the model's weights as after every step: it copies the master
weights to the model and gathers the parts of all ranks.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer, MixedPrecisionOptimizer
from torch.optim import Optimizer

import holdfast
from holdfast.checkpoint.foreign_file_faults import distcp_fault, first_fault, read_names
from holdfast.checkpoint.state_image import StateError
from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.trainers.newest_trainer_checkpoint import OwnCheckpoint, find_own_checkpoint
from holdfast.trainers.optimizer_shards import ShardCheckpointer

_NAME = r"iter_(\d+)"  # as Megatron-LM names its checkpoints
Extras = dict[str, Any]


class HeldMegatron:
    """The state of a Megatron-Core model and its optimizer, which resumes from the newest saved state.

    >>> from holdfast.trainers.megatron import HeldMegatron
    >>> held = HeldMegatron(models, optimizer, schedule, path="ckpt", every=100)  # doctest: +SKIP
    >>> for step in range(held.step + 1, 1001):  # doctest: +SKIP
    ...     loss = train_step()
    ...     held.save(step, loss=loss)
    """

    def __init__(
        self,
        models: Sequence[Any],
        optimizer: MegatronOptimizer,
        schedule: Any = None,
        *,
        extra: Extras | None = None,
        path: str | os.PathLike[str] | None = None,
        every: int | str | None = None,
        keep: int = 3,
    ) -> None:
        """Restore the newest state, and set `step` to the step of this state, or to 0 if there is none. `models` are
        this rank's model chunks, wrapped in Megatron's DistributedDataParallel; `schedule` is the optimizer's parameter
        scheduler. The other options are those of a Checkpointer."""
        chain = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
        self._chain = [one for one in chain if not getattr(one, "is_stub_optimizer", False)]
        if why := refusal_of(self._chain):
            raise StateError(f"HeldMegatron cannot keep this state: {why}")
        self._models = models
        holdfast.attach(models[0])
        told: Extras = {"random": TrackedGenerators(), **(extra or {})}
        if schedule is not None:
            told["schedule"] = schedule
        for n, one in enumerate(self._chain):
            if getattr(one, "grad_scaler", None) is not None:
                told[f"scaler {n}"] = one.grad_scaler
        is_split = any(isinstance(one, DistributedOptimizer) for one in self._chain)
        self._held = ShardCheckpointer(
            [one.optimizer for one in self._chain],
            torch.nn.ModuleList(models),
            told,
            optimizer=optimizer,
            replicated=None if is_split else _find_replicas(),
            path=path,
            every=every,
            keep=keep,
        )
        self.step = self._held.restore(self._gather_weights)

    def save(self, step: int, **reported: Any) -> None:
        """Report this step and save its state, after the schedule's step. `reported` goes to `holdfast.step`."""
        holdfast.step(step, **reported)
        self.step = step
        self._held.save(step)

    def _gather_weights(self) -> None:
        """Compute the weights of the model from the master weights of all ranks."""
        for one in self._chain:
            if isinstance(one, MixedPrecisionOptimizer):
                one._copy_main_params_to_model_params()
        if any(isinstance(one, DistributedOptimizer) for one in self._chain):
            for model in self._models:
                model.start_param_sync(force_sync=True)


class TrackedGenerators:
    """The states of Megatron's own CUDA random number generators, which differ among tensor parallel ranks."""

    def state_dict(self) -> Extras:
        return dict(tensor_parallel.get_cuda_rng_tracker().get_states())

    def load_state_dict(self, state: Extras) -> None:
        tensor_parallel.get_cuda_rng_tracker().set_states(dict(state))


def newest_checkpoint(folder: str | os.PathLike[str]) -> OwnCheckpoint | None:
    """Return the newest whole checkpoint `iter_N` in a folder, or None. Only checkpoints in the format torch_dist of
    `dist_checkpointing.save` with an optimizer's state are found, so none of weights that are there to begin with. All
    ranks must call this."""
    return find_own_checkpoint(Path(folder), _NAME, _fault_of)


def refusal_of(chain: Sequence[MegatronOptimizer]) -> str:
    """Return why a Checkpointer cannot save what these optimizers hold; empty if it can."""
    for one in chain:
        if not isinstance(one.optimizer, Optimizer):
            return f"{type(one.optimizer).__name__} is no optimizer of torch"
        if isinstance(one, DistributedOptimizer) and one.ddp_config.use_megatron_fsdp:
            return "Megatron-FSDP keeps weights in its own way"
        if one.config.use_precision_aware_optimizer or one.config.reuse_grad_buf_for_mxfp8_param_ag:
            return "master weights are inside the optimizer's kernel, or weights have 8 bits"
    return ""


def _find_replicas() -> "dist.ProcessGroup | None":
    """Return the group of ranks that hold the same tensors, or None if some of them hold different experts. Such
    experts have the same names and shapes, so one could be restored in place of another. All ranks must call this."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    of_experts = parallel_state.get_expert_data_parallel_group()
    is_same = sorted(dist.get_process_group_ranks(group)) == sorted(dist.get_process_group_ranks(of_experts))
    return group if all(RankWorld().gather_all(is_same, bool)) else None


def _fault_of(folder: Path) -> str:
    fault = first_fault([folder / "metadata.json", folder / "common.pt"]) or distcp_fault(folder)
    if not fault and not any("optimizer." in name for name in read_names(folder)):
        return "it has weights alone, and no state of an optimizer"
    return fault
