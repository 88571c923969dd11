"""Hooks on the loggers of training scripts, which show holdfast the losses of a script that does not report them.

A hook is installed when the script imports the logger's module, before the script can get the plain function. For a
script that uses none of these loggers, the cost is one table lookup per import. A hook never raises, and passes
arguments and results on as they are.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from holdfast.client.training.logged_losses import LoggedLosses
from holdfast.client.training.progress import RankProgress
from holdfast.client.training.tracker_hooks import TRACKER_CALLS, TrackerHooks, find_tracker_hooks
from holdfast.wire.progress_environment import KEEPER, LOSS_SOURCE, SLOT
from holdfast.wire.replay_environment import is_replay


class LoggerCall(NamedTuple):
    """A function with which scripts log metrics, and the names of its arguments for metrics."""

    module: str
    owner: str  # the class; empty for a function of the module
    function: str
    arguments: tuple[str, ...]  # a mapping of metrics, or a name and a value; none: the result is a part of the loss
    shown: str = ""  # how people know it, if not as owner and function
    aliases: tuple[str, ...] = ()  # modules that hold the same function

    @property
    def text(self) -> str:
        return self.shown or f"{self.owner}.{self.function}"


_LIGHTNING = [
    LoggerCall(f"{package}.{module}", owner, "log_metrics", ("metrics",))
    for packages, module, owner in (
        (("lightning.fabric", "lightning_fabric"), "loggers.csv_logs", "CSVLogger"),
        (("lightning.fabric", "lightning_fabric"), "loggers.tensorboard", "TensorBoardLogger"),
        (("lightning.pytorch", "pytorch_lightning"), "loggers.wandb", "WandbLogger"),
        (("lightning.pytorch", "pytorch_lightning"), "loggers.mlflow", "MLFlowLogger"),
    )
    for package in packages
]
_FLUENT = ("mlflow", "mlflow.tracking")

CALLS = (
    LoggerCall("wandb.sdk.wandb_run", "Run", "log", ("data",), "wandb.log"),
    LoggerCall("torch.utils.tensorboard.writer", "SummaryWriter", "add_scalar", ("tag", "scalar_value")),
    LoggerCall("tensorboardX.writer", "SummaryWriter", "add_scalar", ("tag", "scalar_value")),
    LoggerCall("mlflow.tracking.fluent", "", "log_metric", ("key", "value"), "mlflow.log_metric", _FLUENT),
    LoggerCall("mlflow.tracking.fluent", "", "log_metrics", ("metrics",), "mlflow.log_metrics", _FLUENT),
    # By default the Trainer leaves losses that are not finite out of what it logs; what a step returns has them.
    LoggerCall("transformers.trainer", "Trainer", "training_step", ()),
    LoggerCall("transformers.trainer", "Trainer", "log", ("logs",)),
    *_LIGHTNING,
)


def follow_loggers(progress: RankProgress, *, is_rank: bool = True) -> None:
    """Hook this rank's loggers, imported now or later, to read the rank's losses. With `is_rank`, also let W&B, MLflow
    and TensorBoard log the job's figures. Children of the rank call this without `is_rank`."""
    if SLOT not in os.environ or is_replay():
        return
    progress.logged = LoggedLosses(progress.note_logged, _announce_source)
    finder = LoggerFinder(progress.logged, find_tracker_hooks() if is_rank else None)
    for name in finder.modules:  # few; to walk the table of all modules would copy their pages after a fork
        if name in sys.modules:
            finder.hook_module(sys.modules[name])
    sys.meta_path.insert(0, finder)


class LoggerFinder:
    """An import finder that finds modules by the other finders, and hooks loggers as soon as they are executed."""

    def __init__(self, losses: LoggedLosses, trackers: TrackerHooks | None = None) -> None:
        self._losses, self._trackers = losses, trackers
        tracked = {call.module for call in TRACKER_CALLS} if trackers else set()
        self.modules = frozenset({call.module for call in CALLS} | tracked)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._hook_after(spec.loader)
        return spec

    def _hook_after(self, loader: Any) -> None:
        """Replace `exec_module` of this loader for one call, which executes a module and then hooks its functions."""
        plain = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            plain(module)
            self.hook_module(module)

        loader.exec_module = exec_module

    def hook_module(self, module: ModuleType) -> None:
        for call in CALLS:
            if call.module == module.__name__:
                _hook_call(module, call, self._losses)
        if self._trackers is not None:
            self._trackers.hook_module(module)


def _hook_call(module: ModuleType, call: LoggerCall, losses: LoggedLosses) -> None:
    """Replace the function with its hook; do nothing if this version of the logger lacks the function."""
    owner = getattr(module, call.owner, None) if call.owner else module
    plain = vars(owner).get(call.function) if owner is not None else None
    if not callable(plain) or getattr(plain, "tells_holdfast", False):
        return
    hooked = _read_arguments(plain, call, losses) if call.arguments else _read_result(plain, call, losses)
    vars(hooked)["tells_holdfast"] = True
    setattr(owner, call.function, hooked)
    for name in call.aliases:
        other = sys.modules.get(name)
        if other is not None and vars(other).get(call.function) is plain:
            setattr(other, call.function, hooked)


def _read_arguments(plain: Callable[..., Any], call: LoggerCall, losses: LoggedLosses) -> Callable[..., Any]:
    first = 1 if call.owner else 0  # behind self

    @functools.wraps(plain)
    def seen(*args: Any, **kwargs: Any) -> Any:
        try:
            told = [kwargs[n] if n in kwargs else args[first + i] for i, n in enumerate(call.arguments)]
            losses.on_metrics(call.text, told[0] if len(told) == 1 else {told[0]: told[1]})
        except Exception:
            pass  # the script's own call is around us, and says itself what is wrong with its arguments
        return plain(*args, **kwargs)

    return seen


def _read_result(plain: Callable[..., Any], call: LoggerCall, losses: LoggedLosses) -> Callable[..., Any]:
    @functools.wraps(plain)
    def seen(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        try:
            losses.on_part(call.text, result)
        except Exception:
            pass
        return result

    return seen


def _announce_source(source: str) -> None:
    """Write the source of the losses to a file beside the keeper's socket, where the node reads it."""
    keeper = os.environ.get(KEEPER)
    if keeper:
        place = os.path.join(os.path.dirname(keeper), LOSS_SOURCE)
        whole = f"{place}.{os.getpid()}"
        with open(whole, "w", encoding="utf-8") as file:
            file.write(source)
        os.replace(whole, place)
