"""For the Trainer of Lightning: add `HoldfastCallback` to its callbacks, or `HoldfastPlugin` to its plugins. A callback
may set the position of Lightning's loops before they run, so the state is restored when the fit starts. Lightning
cannot skip batches: those of finished steps are loaded once more, and dropped. A plugin reads and writes checkpoints,
those that `ckpt_path` names."""

import os
from pathlib import Path
from typing import Any

import msgspec
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities import rank_zero_info

import holdfast
from holdfast.checkpoint.keeper_client import KeeperClient, current_generation
from holdfast.checkpoint.snapshot_metadata_record import GeneratorStates
from holdfast.checkpoint.stored_checkpoints import find_checkpoints
from holdfast.client.checkpointing.checkpointer import Checkpointer
from holdfast.client.checkpointing.checkpointer_args import storage_of
from holdfast.client.checkpointing.extra_state import read_generators, set_generators
from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.client.checkpointing.state_preview import peek_state
from holdfast.decoding import from_msgpack
from holdfast.trainers.lightning_plugin import HoldfastPlugin as HoldfastPlugin
from holdfast.trainers.lightning_plugin import find_lightning_fault, list_lightning_checkpoints
from holdfast.trainers.newest_trainer_checkpoint import say_left_out
from holdfast.wire.rank_keeper_messages import StateRequest

_BATCHES = "epoch_loop.batch_progress"  # where the loops keep how many batches were made
Extras = dict[str, Any]


class HoldfastCallback(Callback):  # type: ignore[misc]  # of a library that may be missing
    """Reports the steps and phases of a Trainer, saves its state at every step, and restores the newest state.

    >>> from holdfast.trainers.lightning import HoldfastCallback
    >>> callback = HoldfastCallback(path="ckpt", every=100)
    >>> trainer = Trainer(callbacks=[callback])  # doctest: +SKIP
    >>> trainer.fit(model, loader, ckpt_path=callback.newest_checkpoint("checkpoints"))  # doctest: +SKIP
    """

    def __init__(
        self, *, path: str | os.PathLike[str] | None = None, every: int | str | None = None, keep: int = 3
    ) -> None:
        """`path`, `every` and `keep` are those of a Checkpointer."""
        self._storage: Extras = {"path": path, "every": every, "keep": keep}
        self._checkpointer: Checkpointer | None = None
        self._extra: Extras = {}
        self._epoch: GeneratorStates | None = None  # after a restart: the generators when the epoch began
        self._generators: GeneratorStates | None = None  # and those of the next batch
        self._saved = self._told = 0

    def newest_checkpoint(self, folder: str | os.PathLike[str]) -> str | None:
        """Return Lightning's newest whole checkpoint in a folder, to pass as `ckpt_path`; None if there is none. If
        holdfast has a state, return None too, because that state will be restored."""
        rank, link = int(os.environ.get("RANK", "0")), KeeperClient.for_this_rank()
        if link and link.request_state(StateRequest(rank=rank, generation=current_generation())).source != "none":
            return None
        storage = storage_of(self._storage["path"], None, 0, None)
        if storage and any(one.ok or one.unvouched for one in find_checkpoints(storage.url)):
            return None
        left_out, whole = dict[str, str](), None
        for one in list_lightning_checkpoints(Path(folder)):
            if not (fault := find_lightning_fault(Path(one.path))):
                whole = one.path
                break
            left_out[one.path] = fault
        if rank == 0:
            say_left_out(left_out, whole or "")
        return whole

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        holdfast.attach(mesh=getattr(trainer.strategy, "device_mesh", None))
        holdfast.attach(trainer.model)
        if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
            name = type(trainer.strategy).__name__
            rank_zero_info(f"holdfast: only Lightning's own checkpoints are used, since {name} keeps state its own way")
            return
        self._extra = {"loops": _read_loops(trainer), "callbacks": self._read_callbacks(trainer), "epoch": _encode()}
        self._extra |= {f"schedule {n}": one.scheduler for n, one in enumerate(trainer.lr_scheduler_configs)}
        if trainer.precision_plugin.state_dict():
            self._extra["precision"] = trainer.precision_plugin
        if trainer.datamodule is not None:
            self._extra["data"] = trainer.datamodule
        self._checkpointer = Checkpointer(
            model=trainer.model, optimizer=trainer.optimizers, extra=self._extra, **self._storage
        )
        if not self._is_ours_first(trainer) or not (step := self._checkpointer.restore()):
            return  # Lightning loads what it was told to, after this
        if trainer.ckpt_path is not None:
            trainer._checkpoint_connector._loaded_checkpoint = {}  # so that it restores no more of that
            trainer.ckpt_path = None
        self._saved = self._told = step
        self._generators, self._epoch = read_generators(), _decode(self._extra["epoch"])
        trainer.fit_loop.load_state_dict(self._extra["loops"])
        for callback in trainer.callbacks:
            if callback.state_key in self._extra["callbacks"]:
                callback.load_state_dict(self._extra["callbacks"][callback.state_key])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """If the fit resumes within an epoch, load and drop the finished batches before Lightning reads the loader."""
        self._told = trainer.global_step
        if not self._epoch:
            return
        set_generators(self._epoch)
        loops = trainer.fit_loop
        fetcher, done = loops._data_fetcher, loops.epoch_loop.batch_progress.current.ready
        for loader in loops._combined_loader.flattened:
            _set_sampler_epoch(loader, loops.epoch_progress.current.processed)  # Lightning will, after this
        if trainer.current_epoch > 0:  # of later epochs it is made after they begin
            iter(fetcher)
        if self._generators:
            for _ in range(done):
                next(fetcher)
            fetcher.fetched -= done  # Lightning adds them itself

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch = None
        self._extra["epoch"] = _encode()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Save the state of the step before, now that its validation and checkpoints are done."""
        self._epoch = None
        if self._generators:  # batches that were passed over have drawn from them
            set_generators(self._generators)
            self._generators = None
        if self._checkpointer and trainer.global_step > self._saved:
            self._saved = trainer.global_step
            self._extra["loops"] = _read_loops(trainer)
            self._extra["callbacks"] = self._read_callbacks(trainer)
            self._checkpointer.save(self._saved)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self._told:
            self._told = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            holdfast.step(self._told, loss=loss)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        holdfast.phase("eval")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        holdfast.phase("")

    def state_dict(self) -> Extras:
        """Return all ranks' random number generators; Lightning's checkpoints lack them. All ranks must call this."""
        return {"generators": RankWorld().gather_all(_encode(), bytes)}

    def load_state_dict(self, state_dict: Extras) -> None:
        told, world = state_dict["generators"], RankWorld()
        self._epoch = _decode(told[world.rank]) if len(told) == world.size else None

    def _is_ours_first(self, trainer: Trainer) -> bool:
        """Return whether a state of holdfast's comes before what `ckpt_path` names: because the job has chosen it after
        a fault, or because both are of this run, and ours is newer. All ranks must call this."""
        if trainer.ckpt_path is None:
            return True
        ours = peek_state(self._storage["path"])
        loaded = trainer._checkpoint_connector._loaded_checkpoint.get("global_step", 0)
        plugin = trainer.strategy.checkpoint_io
        plugin = getattr(plugin, "checkpoint_io", plugin)  # in AsyncCheckpointIO
        is_own = isinstance(plugin, HoldfastPlugin) and plugin.is_own(trainer.ckpt_path)
        return ours.is_chosen or (is_own and ours.step > loaded)

    def _read_callbacks(self, trainer: Trainer) -> Extras:
        """Return the states of the other callbacks, such as the best models so far."""
        others = [callback for callback in trainer.callbacks if callback is not self]
        return {callback.state_key: state for callback in others if (state := callback.state_dict())}


def _read_loops(trainer: Trainer) -> Extras:
    """Return the state of Lightning's loops before the batch that was just fetched."""
    state: Extras = trainer.fit_loop.state_dict()
    state["state_dict"].pop("combined_loader", None)  # a loader that counts has counted that batch
    batches = state[_BATCHES] = msgspec.to_builtins(state[_BATCHES])
    batches["is_last_batch"] = False
    for count in (batches["total"], batches["current"]):
        count["ready"] = count["completed"]
    return state


def _encode() -> bytes:
    return msgspec.msgpack.encode(read_generators())


def _decode(generators: bytes) -> GeneratorStates:
    return from_msgpack(generators, GeneratorStates)
