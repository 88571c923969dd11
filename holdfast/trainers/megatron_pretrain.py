"""For Megatron-LM's `pretrain`, whose loop has no place for a line of ours: call `hold_pretrain()` before it.

`pretrain` looks up its own parts by name in `megatron.training.training`. Five of them are replaced by ones that call
the original and do our work beside it: the model and optimizer that it sets up are restored, losses are read from its
step, the state is saved where it decides on its own checkpoint, and evaluations and checkpoints are phases.
"""

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import holdfast
from holdfast.checkpoint.snapshot_metadata_record import GeneratorStates
from holdfast.checkpoint.state_image import StateError
from holdfast.client.checkpointing.extra_state import read_generators, set_generators
from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.client.checkpointing.state_preview import peek_state
from holdfast.client.training.stderr_sentence import say
from holdfast.trainers.megatron import HeldMegatron, newest_checkpoint

_MODULE = "megatron.training.training"
_COUNTED = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples", "consumed_train_bins")
_OPERATIONS = "num_floating_point_operations_so_far"
_PHASES = {"evaluate_and_print_results": "eval", "save_checkpoint_and_time": "save"}
_GRAD_NORM = 5  # its place in what `train_step` returns
Values = dict[str, Any]
Part = Callable[..., Any]


def hold_pretrain(*, path: str | os.PathLike[str] | None = None, every: int | str | None = None, keep: int = 3) -> None:
    """Make Megatron-LM's `pretrain` resume from the newest state, report its steps, and save its state after each of
    them. If holdfast has no state, Megatron's own newest whole checkpoint of `--load` is used. The options are those of
    a Checkpointer.

    >>> from holdfast.trainers.megatron_pretrain import hold_pretrain
    >>> hold_pretrain(path="ckpt", every=100)  # doctest: +SKIP
    >>> pretrain(datasets, model_provider, ModelType.encoder_or_decoder, forward_step)  # doctest: +SKIP
    """
    training = importlib.import_module(_MODULE)
    held = HeldPretrain(training, {"path": path, "every": every, "keep": keep})
    parts: dict[str, Part] = {
        "setup_model_and_optimizer": held.set_up,
        "train_step": held.train_step,
        "checkpoint_and_decide_exit": held.decide_exit,
        **{name: functools.partial(_call_in_phase, phase) for name, phase in _PHASES.items()},
    }
    if missing := sorted(name for name in (*parts, "get_args") if not callable(getattr(training, name, None))):
        raise StateError(f"hold_pretrain does not know this version of Megatron-LM: {_MODULE} has no {missing[0]}")
    for name, part in parts.items():
        own = getattr(training, name)
        setattr(training, name, functools.wraps(own)(functools.partial(part, own)))


class HeldPretrain:
    """What `pretrain` is called with instead of its own parts; each is handed the original first."""

    def __init__(self, training: ModuleType, storage: Values) -> None:
        self._training, self._storage = training, storage
        self._held: HeldMegatron | None = None
        self._counters: TrainCounters | None = None
        self._drawn: GeneratorStates | None = None  # as they were restored, until the first step
        self._reported: Values = {}  # of the step that is being made

    def set_up(self, own: Part, *args: Any, **kwargs: Any) -> Any:
        """Set up the model, and restore the newest state. All ranks must call this."""
        told = self._training.get_args()
        if getattr(told, "skip_train", False):
            return own(*args, **kwargs)
        before = {name: getattr(told, name, None) for name in ("load", "pretrained_checkpoint", "ckpt_step")}
        held_step = peek_state(self._storage["path"]).step
        if held_step:
            told.load = told.pretrained_checkpoint = None  # it would be read only to be overwritten
        elif told.load and told.ckpt_step is None:
            told.ckpt_step = _find_whole(Path(told.load))
        try:
            made = own(*args, **kwargs)
        finally:
            for name, value in before.items():
                setattr(told, name, value)
        models, optimizer, schedule = made[:3]
        counters = TrainCounters(told)
        extra = {"counters": counters}
        self._held = HeldMegatron(models, optimizer, schedule, extra=extra, **self._storage)
        self._counters = counters
        if self._held.step:
            told.iteration = self._held.step
            microbatches = importlib.import_module("megatron.core.num_microbatches_calculator")
            microbatches.update_num_microbatches(told.consumed_train_samples, consistency_check=False)
        self._drawn = read_generators() if told.iteration else None
        return made

    def train_step(self, own: Part, *args: Any, **kwargs: Any) -> Any:
        """Make a step, and note its loss unless its update was skipped, as after an overflow of 16 bits. The first one
        after a restore gets the random numbers that were restored: since then the loaders of batches drew from them."""
        if self._drawn:
            set_generators(self._drawn)
            self._drawn = None
        done = own(*args, **kwargs)
        losses, is_skipped = done[0], done[1]
        self._reported = {}
        if losses and not is_skipped:
            self._reported["loss"] = next(iter(losses.values()))
        if not is_skipped and len(done) > _GRAD_NORM:
            self._reported["grad_norm"] = done[_GRAD_NORM]
        return done

    def decide_exit(self, own: Part, *args: Any, **kwargs: Any) -> Any:
        """Save the state of the step that was just made, then let Megatron save its own and decide whether to exit."""
        given = inspect.signature(own).bind(*args, **kwargs).arguments
        if self._held is not None and self._counters is not None:
            self._counters.operations = given[_OPERATIONS]
            self._held.save(given["iteration"], **self._reported)
        return own(*args, **kwargs)


class TrainCounters:
    """The samples and operations that Megatron counts in its arguments while it trains."""

    def __init__(self, told: Any) -> None:
        self._told = told
        self.operations = getattr(told, _OPERATIONS, 0)

    def state_dict(self) -> Values:
        fields = vars(self._told)
        return {name: fields[name] for name in _COUNTED if name in fields} | {_OPERATIONS: self.operations}

    def load_state_dict(self, state: Values) -> None:
        vars(self._told).update(state)
        self.operations = state[_OPERATIONS]


def _call_in_phase(phase: str, own: Part, *args: Any, **kwargs: Any) -> Any:
    with holdfast.phase(phase):
        return own(*args, **kwargs)


def _find_whole(folder: Path) -> int | None:
    """Return the step of the newest whole checkpoint in `--load` if Megatron would take another one; else None, so that
    Megatron chooses. All ranks must call this."""
    found = newest_checkpoint(folder)
    if found is None:
        return None
    try:
        chosen = (folder / "latest_checkpointed_iteration.txt").read_text().strip()
    except OSError:
        return None  # Megatron starts anew without this file, and says so
    if chosen == "release" or chosen == str(found.step):
        return None
    if RankWorld().rank == 0:
        say(f"{found.path} is used, the newest whole one; Megatron would have taken step {chosen}")
    return found.step
