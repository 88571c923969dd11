"""For the Trainer of transformers: call `train(trainer)` instead of `trainer.train()`.

The Trainer's loop reads its position once, from the folder in `resume_from_checkpoint`, before any callback is
called. So `train` looks beforehand at the state that will be restored, and gives the Trainer a folder that holds only
the position. A callback then restores everything else, once the model is wrapped and the optimizer exists.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

import holdfast
from holdfast.checkpoint.foreign_file_faults import distcp_fault, first_fault
from holdfast.checkpoint.state_image import StateError
from holdfast.checkpoint.trainer_checkpoints import verify_trainer_checkpoint
from holdfast.client.checkpointing.checkpointer import Checkpointer
from holdfast.client.checkpointing.extra_state import read_generators, set_generators
from holdfast.client.checkpointing.state_preview import PeekedState, peek_state
from holdfast.trainers.accelerate import refusal_of
from holdfast.trainers.newest_trainer_checkpoint import OwnCheckpoint, find_own_checkpoint

_STATE = "trainer_state.json"
_HISTORY_BYTES = 64 << 10  # of what was logged, the newest: a snapshot has room for so much
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_SHARDS = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def train(
    trainer: Trainer, *, path: str | os.PathLike[str] | None = None, every: int | str | None = None, keep: int = 3
) -> TrainOutput:
    """Train as `trainer.train()` does, from the newest state. If the job has chosen a state, that one is used.
    Otherwise it is the newest of holdfast's saved state and the whole checkpoints in the output directory. `path`,
    `every` and `keep` are those of a Checkpointer.

    >>> from holdfast.trainers.huggingface import train
    >>> train(trainer, path="ckpt", every=100)  # doctest: +SKIP
    """
    callback = TrainerStateCallback(trainer, {"path": path, "every": every, "keep": keep})
    trainer.add_callback(callback)
    try:
        with callback.resumable_folder() as folder:
            return trainer.train(resume_from_checkpoint=folder)
    finally:
        trainer.remove_callback(callback)


class TrainerStateCallback(TrainerCallback):  # type: ignore[misc]  # of a library that may be missing
    """Reports the steps and phases of a Trainer, and saves its state at every step."""

    def __init__(self, trainer: Trainer, storage: dict[str, Any]) -> None:
        self._trainer = trainer
        self._storage = storage
        self._refusal = refusal_of(trainer.accelerator)
        self._checkpointer: Checkpointer | None = None
        self._own: OwnCheckpoint | None = None  # of the trainer's, if that is what it goes on from
        self._extra: dict[str, Any] = {}
        self._generators: Any = None  # as they were, for the first step that is made
        self._saved = 0
        self._tokens = 0
        self._phase = ""

    @contextmanager
    def resumable_folder(self) -> Iterator[str | None]:
        """Yield the value to pass as `resume_from_checkpoint`: a path or None. All ranks must call this."""
        ours = PeekedState() if self._refusal else peek_state(self._storage["path"])
        if not ours.is_chosen:
            self._own = _find_own(self._trainer.args)
            if self._own and self._own.step <= ours.step:
                self._own = None
        if self._own or not ours.step:
            yield self._own.path if self._own else None
            return
        with TemporaryDirectory(prefix="holdfast-") as folder:
            if "trainer" not in ours.extra:
                where = f"{self._storage['path']} or in memory"
                raise StateError(
                    f"the state of step {ours.step} in {where} was not saved by a Trainer; give another path"
                )
            Path(folder, _STATE).write_text(ours.extra["trainer"])
            with _weights_left_out(self._trainer, folder):
                yield folder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        holdfast.attach(mesh=getattr(self._trainer.accelerator, "torch_device_mesh", None))
        holdfast.attach(self._trainer.model_wrapped)
        self._tokens = state.num_input_tokens_seen
        try:
            self._make_checkpointer()
        except (StateError, TypeError, ValueError) as e:
            if self._storage["path"]:
                raise
            self._refusal = self._refusal or str(e)
        if self._refusal:
            print(f"holdfast: only the Trainer's own checkpoints are used: {self._refusal}", file=sys.stderr)
        if not self._checkpointer or self._own:
            return
        self._saved = self._checkpointer.restore()
        if self._saved != state.global_step:
            raise StateError(f"step {self._saved} was restored, but the Trainer goes on from step {state.global_step}")
        if self._saved:
            self._generators = read_generators()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the state of the step before, now that its evaluation and checkpoints are done."""
        self._enter_phase("")
        if self._generators:  # batches that were passed over have drawn from them
            set_generators(self._generators)
            self._generators = None
        if self._checkpointer and state.global_step > self._saved:
            self._saved = state.global_step
            self._extra["trainer"] = _tell_state(self._trainer)
            self._checkpointer.save(self._saved)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        tokens, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
        holdfast.step(state.global_step, tokens=tokens or None)
        self._enter_phase("eval" if control.should_evaluate else "save" if control.should_save else "")

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._enter_phase("eval" if control.should_evaluate else "save" if control.should_save else "")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._enter_phase("save" if control.should_save else "")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._enter_phase("")

    def _enter_phase(self, name: str) -> None:
        if name != self._phase:
            self._phase = name
            holdfast.phase(name)

    def _make_checkpointer(self) -> None:
        if self._refusal:
            return
        trainer = self._trainer
        self._extra = {"trainer": _tell_state(trainer), "schedule": trainer.lr_scheduler}
        if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
            self._extra["scaler"] = scaler
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # in Accelerate's wrapper
        model = trainer.model_wrapped
        self._checkpointer = Checkpointer(model=model, optimizer=optimizer, extra=self._extra, **self._storage)


@contextmanager
def _weights_left_out(trainer: Trainer, folder: str) -> Iterator[None]:
    """During the block, keep the trainer from loading weights from holdfast's folder, which has none. The trainer has
    no public option for this, so its method is replaced."""
    load = trainer._load_from_checkpoint

    def load_from_others(checkpoint: str, model: object = None) -> None:
        if checkpoint != folder:
            load(checkpoint, model)

    trainer._load_from_checkpoint = load_from_others
    try:
        yield
    finally:
        del trainer._load_from_checkpoint


def _tell_state(trainer: Trainer) -> str:
    """Return the trainer's state as JSON, as in its own checkpoints, but with only the newest part of its log."""
    state = trainer.state
    told = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    history, room = list[str](), _HISTORY_BYTES
    for entry in map(json.dumps, reversed(state.log_history)):
        room -= len(entry)
        if room < 0:
            break
        history.append(entry)
    told["log_history"] = [json.loads(entry) for entry in reversed(history)]
    told["stateful_callbacks"] = callbacks = dict(state.stateful_callbacks)
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        name = type(callback).__name__
        if isinstance(callback, ExportableState) and not isinstance(callbacks.get(name), list):
            callbacks[name] = callback.state()
    return json.dumps(told)


def _find_own(args: TrainingArguments) -> OwnCheckpoint | None:
    return find_own_checkpoint(Path(args.output_dir), r"checkpoint-(\d+)", lambda folder: _fault_of(folder, args))


def _fault_of(folder: Path, args: TrainingArguments) -> str:
    """Return what is wrong with a checkpoint of the Trainer; empty if it is whole."""
    if fault := first_fault([folder / _STATE]):
        return fault
    if f"checkpoint-{json.loads((folder / _STATE).read_bytes()).get('global_step')}" != folder.name:
        return f"{_STATE} is of another step"
    random = [f"rng_state_{rank}.pth" for rank in range(args.world_size)] if args.world_size > 1 else ["rng_state.pth"]
    if (tag := folder / "latest").is_file():  # of DeepSpeed, which loads the folder that this names
        parts = verify_trainer_checkpoint(str(folder / tag.read_text().strip())).fault
        return parts or first_fault([folder / name for name in random])
    if sharded := [*folder.glob("pytorch_model_fsdp_*/"), *folder.glob("optimizer_*/")]:
        parts = next((f"{one.name}: {fault}" for one in sorted(sharded) if (fault := distcp_fault(one))), "")
        return parts or first_fault([folder / name for name in random])
    shards = set[str]()
    for index in (folder / name for name in _SHARDS if (folder / name).is_file()):
        if fault := first_fault([index]):
            return fault
        shards |= {*json.loads(index.read_bytes())["weight_map"].values()}
    weights = shards or {name for name in _WEIGHTS if (folder / name).is_file()}
    if not weights:
        return "it has no weights"
    scaler = ["scaler.pt"] if (folder / "scaler.pt").exists() else []
    return first_fault(folder / name for name in (*sorted(weights), "optimizer.pt", "scheduler.pt", *scaler, *random))
