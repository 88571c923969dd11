"""For loops on DeepSpeed's engine: call `hold_engine(engine)` after `deepspeed.initialize`; the loop stays as it was.

With ZeRO 1 and 2, each rank saves only its own part of the master weights and of the optimizer's state. From these, the
engine computes the weights of the model, as it does after every step.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.optim import Optimizer

import holdfast
from holdfast.checkpoint.foreign_file_faults import first_fault
from holdfast.checkpoint.snapshot_metadata_record import GeneratorStates
from holdfast.client.checkpointing.extra_state import read_generators, set_generators
from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.client.training.stderr_sentence import say
from holdfast.decoding import from_msgpack
from holdfast.trainers.newest_trainer_checkpoint import find_own_checkpoint
from holdfast.trainers.optimizer_shards import PlainFields, ShardCheckpointer

_TAG = r"global_step(\d+)"  # as the engine names a checkpoint that is given no tag
_COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_GENERATORS = "holdfast_generators"  # in the client state of the engine's own checkpoints
Extras = dict[str, Any]


def hold_engine(
    engine: DeepSpeedEngine,
    *,
    own: str | os.PathLike[str] | None = None,
    extra: Extras | None = None,
    path: str | os.PathLike[str] | None = None,
    every: int | str | None = None,
    keep: int = 3,
) -> Extras:
    """Restore the newest state into the engine. From then on, report the engine's steps and save its state after each.
    The loop must go on from `engine.global_steps`.

    `own` is the folder of the engine's own checkpoints. If holdfast has no state, the newest whole one is loaded from
    there, and its client state is returned. The other options are those of a Checkpointer.

    >>> from holdfast.trainers.deepspeed import hold_engine
    >>> hold_engine(engine, path="ckpt", every=100)  # doctest: +SKIP
    >>> for step in range(engine.global_steps, 1000):  # doctest: +SKIP
    ...     engine.backward(engine(batch).sum())
    ...     engine.step()
    """
    held: ShardCheckpointer | None = None
    if why := refusal_of(engine):
        if RankWorld().rank == 0:
            say(f"only DeepSpeed's own checkpoints are used: {why}")
    else:
        held = _shards_of(engine, extra or {}, {"path": path, "every": every, "keep": keep})
    if engine.mp_world_size == 1:
        holdfast.attach(mesh={"dp": RankWorld().size})
    step = held.restore(_gather_of(engine)) if held else 0
    client = _load_own(engine, Path(own)) if own is not None and not step else {}
    _report_steps(engine, held)
    return client


def refusal_of(engine: DeepSpeedEngine) -> str:
    """Return why a Checkpointer cannot save the state of this engine; empty if it can."""
    optimizer = engine.optimizer
    if isinstance(engine, PipelineEngine):
        return "a PipelineEngine makes whole steps by itself"
    if engine.has_moe_layers:
        return "experts are split over ranks in another way"
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return "the optimizer's state is offloaded" if optimizer.cpu_offload else ""
    if isinstance(optimizer, Optimizer):
        return ""
    return f"{type(optimizer).__name__} keeps weights in its own way; ZeRO 1 and 2 and plain optimizers are known"


def _shards_of(engine: DeepSpeedEngine, extra: Extras, storage: Extras) -> ShardCheckpointer:
    optimizer = engine.optimizer
    told = {"engine": PlainFields(engine, _COUNTS), **extra}
    if engine.lr_scheduler is not None:
        told["schedule"] = engine.lr_scheduler
    is_split = isinstance(optimizer, DeepSpeedZeroOptimizer)
    if is_split:
        told["scaler"] = PlainFields(optimizer.loss_scaler)
    plain = optimizer.optimizer if is_split else optimizer
    replicated = True if not is_split and engine.mp_world_size == 1 else None
    return ShardCheckpointer([plain], engine.module, told, optimizer=optimizer, replicated=replicated, **storage)


def _gather_of(engine: DeepSpeedEngine) -> Callable[[], object]:
    """Return a function that computes the model's weights from the master weights of all ranks."""
    is_split = isinstance(engine.optimizer, DeepSpeedZeroOptimizer)
    return engine.optimizer.update_lp_params if is_split else lambda: None


def _report_steps(engine: DeepSpeedEngine, held: ShardCheckpointer | None) -> None:
    """Wrap the engine's backward, step and save_checkpoint, to report its steps and save its state."""
    backward, make_step, save = engine.backward, engine.step, engine.save_checkpoint
    losses: list[Any] = [None]

    def backward_with_loss(loss: Any, *args: Any, **kwargs: Any) -> Any:
        losses[0] = loss.detach() if hasattr(loss, "detach") else loss
        return backward(loss, *args, **kwargs)

    def reported_step(*args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        made = make_step(*args, **kwargs)
        if engine.global_steps > before:
            holdfast.step(engine.global_steps, loss=losses[0])
            if held:
                held.save(engine.global_steps)
        return made

    def save_with_generators(
        save_dir: Any, tag: Any = None, client_state: Extras | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        with holdfast.phase("save"):
            told = RankWorld().gather_all(msgspec.msgpack.encode(read_generators()), bytes)
            return save(save_dir, tag, {**(client_state or {}), _GENERATORS: told}, *args, **kwargs)

    engine.backward, engine.step, engine.save_checkpoint = backward_with_loss, reported_step, save_with_generators


def _load_own(engine: DeepSpeedEngine, folder: Path) -> Extras:
    """Load the newest whole checkpoint that the engine has saved; return its client state."""
    world = RankWorld()
    files = {name for names in world.gather_all(_files_of(engine), list[str]) for name in names}
    found = find_own_checkpoint(folder, _TAG, lambda one: first_fault(one / name for name in sorted(files)))
    if found is None:
        return {}
    client: Extras = engine.load_checkpoint(folder, tag=Path(found.path).name)[1] or {}
    told = client.pop(_GENERATORS, [])
    if len(told) == world.size:
        set_generators(from_msgpack(told[world.rank], GeneratorStates))
    return client


def _files_of(engine: DeepSpeedEngine) -> list[str]:
    """Return the names of the files that this rank will read."""
    names = [engine._get_ckpt_name("", "")]
    if engine.zero_optimization():
        names.append(engine._get_zero_ckpt_name("", ""))
    return [Path(name).name for name in names]
