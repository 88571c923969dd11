"""For TorchTitan: call `hold_trainer(trainer)` before `trainer.train()`. TorchTitan's loop asks its checkpointer for a
state when it starts, and calls it after every step. holdfast replaces this checkpointer by one that saves the state
itself, and then calls the original."""

import os
from pathlib import Path
from typing import Any

from torchtitan.trainer import Trainer

import holdfast
from holdfast.checkpoint.foreign_file_faults import distcp_fault
from holdfast.client.checkpointing.checkpointer import Checkpointer
from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.client.checkpointing.state_preview import peek_state
from holdfast.client.training.stderr_sentence import say
from holdfast.trainers.newest_trainer_checkpoint import find_own_checkpoint, list_newest_first

_NAME = r"step-(\d+)"
Extras = dict[str, Any]


def hold_trainer(
    trainer: Trainer, *, path: str | os.PathLike[str] | None = None, every: int | str | None = None, keep: int = 3
) -> None:
    """Make this trainer resume from the newest state, report its steps, and save its state after each step. If holdfast
    has no state, the trainer's own checkpoints are used. The options are those of a Checkpointer.

    >>> from holdfast.trainers.torchtitan import hold_trainer
    >>> hold_trainer(trainer, path="ckpt", every=100)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """
    dims = trainer.parallel_dims
    sizes = {"pp": dims.pp, "dp": dims.dp_replicate * dims.dp_shard, "cp": dims.cp, "tp": dims.tp}
    holdfast.attach(mesh={name: size for name, size in sizes.items() if size > 1} or None)
    trainer.checkpointer = HeldCheckpoints(trainer, {"path": path, "every": every, "keep": keep})


class HeldCheckpoints:
    """Replaces a trainer's checkpointer, and passes on to it all calls that it does not handle itself."""

    def __init__(self, trainer: Trainer, storage: Extras) -> None:
        self._trainer = trainer
        self._own = trainer.checkpointer
        self._storage = storage
        self._checkpointer: Checkpointer | None = None
        self._logged: Extras = {}  # loss and gradient norm of the step that is being made
        self._log = trainer.metrics_processor.log
        trainer.metrics_processor.log = self._log_with_loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def load(self, step: int = -1) -> bool:
        """Restore the first of these that exists, and return whether one does: a state chosen by the job, the step that
        the configuration names, holdfast's newest state, TorchTitan's newest whole checkpoint. With pipeline
        parallelism only TorchTitan's checkpoints are used. All ranks must call this."""
        trainer = self._trainer
        if trainer.parallel_dims.pp_enabled:
            if RankWorld().rank == 0:
                say("only TorchTitan's own checkpoints are used: a pipeline's stages have no state of ours yet")
        else:
            extra = {"trainer": trainer, "schedules": trainer.lr_schedulers, "data": trainer.dataloader}
            self._checkpointer = Checkpointer(
                model=trainer.model_parts[0], optimizer=[*trainer.optimizers], extra=extra, **self._storage
            )
            if (step < 0 or peek_state(None).is_chosen) and self._checkpointer.restore():
                return True
        folder = Path(str(getattr(self._own, "folder", "")))  # a URL is no folder here, and left to TorchTitan
        if step >= 0 or not any(RankWorld().gather_all(bool(list_newest_first(folder, _NAME)), bool)):
            return bool(self._own.load(step))
        found = find_own_checkpoint(folder, _NAME, distcp_fault)
        return found is not None and bool(self._own.load(found.step))

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Report the step and save its state. Then TorchTitan's own checkpointer decides whether it saves too."""
        holdfast.step(curr_step, **self._logged)
        self._logged = {}
        if self._checkpointer:
            self._checkpointer.save(curr_step)
        with holdfast.phase("save"):
            return bool(self._own.save(curr_step, last_step=last_step))

    def _log_with_loss(self, step: int, loss: float, largest: float, grad_norm: float, *args: Any, **more: Any) -> None:
        self._logged = {"loss": loss, "grad_norm": grad_norm}
        self._log(step, loss, largest, grad_norm, *args, **more)
