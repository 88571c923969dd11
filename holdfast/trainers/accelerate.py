"""For loops on Accelerate: `HeldTraining` yields a loop's epochs and batches, and saves its state after every step. It
saves right before it yields the next batch, because all work of the step before is done by then. After a restart,
training continues at the same batch, with the same order of batches and the same random numbers."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import Accelerator, DistributedType

import holdfast
from holdfast.checkpoint.foreign_file_faults import distcp_fault, first_fault
from holdfast.checkpoint.snapshot_metadata_record import GeneratorStates
from holdfast.checkpoint.state_image import StateError, bytes_of
from holdfast.client.checkpointing.checkpointer import Checkpointer
from holdfast.client.checkpointing.extra_state import read_generators, set_generators
from holdfast.decoding import from_msgpack
from holdfast.trainers.newest_trainer_checkpoint import OwnCheckpoint, find_own_checkpoint, list_newest_first

_NAME = r"checkpoint_(\d+)"  # as `automatic_checkpoint_naming` gives it
_SAVED = frozenset({".safetensors", ".bin", ".pkl", ".pt", ".json"})
Extras = dict[str, Any]


class HeldTraining:
    """The epochs and batches of a loop on Accelerate, which resumes from the newest saved state.

    >>> from holdfast.trainers.accelerate import HeldTraining
    >>> training = HeldTraining(accelerator, model=model, optimizer=optimizer, path="ckpt")  # doctest: +SKIP
    >>> for epoch in training.epochs(3):  # doctest: +SKIP
    ...     for batch in training.batches(loader):
    ...         accelerator.backward(model(batch).sum())
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        model: Any,
        optimizer: Any,
        extra: Extras | None = None,
        path: str | os.PathLike[str] | None = None,
        every: int | str | None = None,
        keep: int = 3,
    ) -> None:
        """Restore the newest state. Pass `model` and `optimizer` as `prepare` returned them; the other options are
        those of a Checkpointer. Without a state of holdfast, the newest whole checkpoint of `accelerator.save_state` is
        loaded. This requires `automatic_checkpoint_naming`."""
        if why := refusal_of(accelerator):
            raise StateError(f"HeldTraining cannot keep this state: {why}")
        self.epoch = self.step = 0
        self._saved = 0
        self._accelerator = accelerator
        self._done = 0  # batches of the epoch
        self._is_inside = False  # of a batch that was handed out
        self._order = b""  # generators at the start of the epoch, from which the order of its batches follows
        self._generators: GeneratorStates | None = None  # after a restart: for the next batch
        self._loss: Any = None
        self._backward = accelerator.backward
        accelerator.backward = self._backward_with_loss
        holdfast.attach(mesh=getattr(accelerator, "torch_device_mesh", None))
        holdfast.attach(model)
        several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        scaler = {"scaler": accelerator.scaler} if accelerator.scaler is not None else {}
        self._checkpointer = Checkpointer(
            model=model,
            optimizer=[getattr(one, "optimizer", one) for one in several],  # in Accelerate's wrapper
            extra={"training": self, **scaler, **(extra or {})},
            path=path,
            every=every,
            keep=keep,
        )
        accelerator.register_for_checkpointing(self)
        self._go_on()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs, out of `count`, that are not finished yet."""
        for epoch in range(self.epoch, count):
            yield epoch
            if self.epoch == epoch:  # left before its end
                self.epoch, self._done = epoch + 1, 0

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the remaining batches of this epoch. Call this once in each epoch, with a prepared loader."""
        self._begin_epoch(loader)
        for batch in self._accelerator.skip_first_batches(loader, self._done) if self._done else loader:
            if self._generators:
                set_generators(self._generators)  # batches that were passed over have drawn from them
                self._generators = None
            elif self.step > self._saved and self._accelerator.sync_gradients:
                self._saved = self.step
                self._checkpointer.save(self.step)
            self._is_inside = True
            yield batch
            self._is_inside = False
            self._done += 1
            if self._accelerator.sync_gradients:
                self.step += 1
                holdfast.step(self.step, loss=self._loss)
        self.epoch, self._done, self._order = self.epoch + 1, 0, _read_order(loader)

    def state_dict(self) -> Extras:
        """Return the position in training; a batch that was handed out counts as done."""
        stepped = self._is_inside and self._accelerator.sync_gradients
        return {
            "epoch": self.epoch,
            "done": self._done + self._is_inside,
            "step": self.step + bool(stepped),
            "order": self._order,
        }

    def load_state_dict(self, state: Extras) -> None:
        self.epoch, self._done, self.step = state["epoch"], state["done"], state["step"]
        self._order = state["order"]

    def _go_on(self) -> None:
        """Restore holdfast's newest state or else Accelerate's newest checkpoint. All ranks must call this."""
        self._saved = self._checkpointer.restore()
        configuration = self._accelerator.project_configuration
        is_named = configuration.automatic_checkpoint_naming and self._accelerator.project_dir
        folder = Path(self._accelerator.project_dir, "checkpoints") if is_named else None
        if folder and (there := list_newest_first(folder, _NAME)):
            configuration.iteration = there[0].step + 1  # so that the next one finds its name free
        if self._checkpointer.restored_from == "none" and folder and (own := self._find_own(folder)):
            self._accelerator.load_state(own.path)
            self._saved = self.step
            if not self._done:  # saved between two epochs, and whatever was drawn since the last batch has been
                self._order = _encode_order(read_generators(), _decode_order(self._order)[1])
        self._generators = read_generators() if self.step else None

    def _begin_epoch(self, loader: Any) -> None:
        """Begin an epoch; if it was begun before a restart, restore the order of its batches."""
        if self._generators:
            generators, drawn = _decode_order(self._order)
            set_generators(generators)
            if drawn:
                loader.synchronized_generator.set_state(torch.frombuffer(bytearray(drawn), dtype=torch.uint8))
        else:
            self._order = _read_order(loader)
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self.epoch)

    def _find_own(self, folder: Path) -> OwnCheckpoint | None:
        needed = _list_needed(self._accelerator)
        return find_own_checkpoint(folder, _NAME, lambda checkpoint: _fault_of(checkpoint, needed))

    def _backward_with_loss(self, loss: Any, **kwargs: Any) -> None:
        self._loss = loss.detach() if hasattr(loss, "detach") else loss
        self._backward(loss, **kwargs)


def refusal_of(accelerator: Accelerator) -> str:
    """Return why a Checkpointer cannot save what this Accelerator has prepared; empty if it can."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "DeepSpeed keeps the optimizer's state in its own engine"
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 1) == 1:
        return "FSDP 1 flattens parameters; set fsdp_version to 2"
    return ""


def _list_needed(accelerator: Accelerator) -> list[tuple[str, ...]]:
    """Return what `load_state` will load: for each part its file, or what there may be instead of it."""
    weights = [
        (
            f"model{end}.safetensors",
            f"pytorch_model{end}.bin",
            f"pytorch_model_fsdp{end}.bin",
            f"pytorch_model_fsdp_{n}",
        )
        for n, end in _number_parts(accelerator._models)
    ]
    optimizers = [(f"optimizer{end}.bin", f"optimizer_{n}") for n, end in _number_parts(accelerator._optimizers)]
    schedules = [(f"scheduler{end}.bin",) for _, end in _number_parts(accelerator._schedulers)]
    custom = [(f"custom_checkpoint_{n}.pkl",) for n in range(len(accelerator._custom_objects))]
    scaler = [("scaler.pt",)] if accelerator.scaler is not None else []
    random = [(f"random_states_{rank}.pkl",) for rank in range(accelerator.num_processes)]
    return [*weights, *optimizers, *schedules, *custom, *scaler, *random]


def _number_parts(parts: Sequence[object]) -> list[tuple[int, str]]:
    return [(n, f"_{n}" if n else "") for n in range(len(parts))]


def _fault_of(checkpoint: Path, needed: list[tuple[str, ...]]) -> str:
    """Return what is wrong with a checkpoint of `save_state`; "" if all that is needed is there, and all is whole."""
    there = {path.name: path.is_dir() for path in checkpoint.iterdir()}
    names = {next((name for name in ways if name in there), ways[0]) for ways in needed}
    files = {name for name in (*names, *there) if not there.get(name)}
    if fault := first_fault(checkpoint / name for name in sorted(files) if Path(name).suffix in _SAVED):
        return fault
    faults = ((name, distcp_fault(checkpoint / name)) for name in sorted(names) if there.get(name))
    return next((f"{name}: {fault}" for name, fault in faults if fault), "")


def _read_order(loader: Any) -> bytes:
    generator = getattr(loader, "synchronized_generator", None)  # of Accelerate, where ranks draw the order together
    return _encode_order(read_generators(), bytes(bytes_of(generator.get_state())) if generator is not None else b"")


def _encode_order(generators: GeneratorStates, drawn: bytes) -> bytes:
    return msgspec.msgpack.encode((generators, drawn))


def _decode_order(order: bytes) -> tuple[GeneratorStates, bytes]:
    return from_msgpack(order, tuple[GeneratorStates, bytes])
