"""Hooks on W&B, MLflow and TensorBoard: calls of the script also carry the job's figures, and runs are resumed."""

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from holdfast.client.training.tracker_events import (
    TrackerEvents,
    add_to_board,
    add_to_mlflow,
    attempt,
    end_board,
    end_mlflow,
    end_wandb,
    log_with_figures,
)
from holdfast.client.training.tracker_runs import (
    RunCall,
    TrackerRuns,
    log_mlflow_parameters,
    start_mlflow,
    start_wandb,
)
from holdfast.wire.progress_environment import KEEPER, TRACKED_RUN

Hook = Callable[["TrackerHooks", ModuleType, Callable[..., Any]], Callable[..., Any]]


def _hook_wandb_log(hooks: "TrackerHooks", module: ModuleType, plain: Callable[..., Any]) -> Callable[..., Any]:
    def log(*args: Any, **kwargs: Any) -> Any:
        given = args, kwargs
        args, kwargs = attempt(lambda: log_with_figures(hooks.events, *given), given)
        return plain(*args, **kwargs)

    return log


def _hook_board(hooks: "TrackerHooks", module: ModuleType, plain: Callable[..., Any]) -> Callable[..., Any]:
    def add_scalar(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        step = kwargs.get("global_step", args[3] if len(args) > 3 else None)
        attempt(lambda: add_to_board(hooks.events, plain, args[0], step), None)
        return result

    return add_scalar


def _hook_wandb_end(hooks: "TrackerHooks", module: ModuleType, plain: Callable[..., Any]) -> Callable[..., Any]:
    def finish(*args: Any, **kwargs: Any) -> Any:
        attempt(lambda: end_wandb(hooks.events, args[0]), None)
        return plain(*args, **kwargs)

    return finish


def _hook_board_end(hooks: "TrackerHooks", module: ModuleType, plain: Callable[..., Any]) -> Callable[..., Any]:
    def close(*args: Any, **kwargs: Any) -> Any:
        attempt(lambda: end_board(hooks.events, type(args[0]).add_scalar, args[0]), None)
        return plain(*args, **kwargs)

    return close


def _hook_mlflow_end(hooks: "TrackerHooks", module: ModuleType, plain: Callable[..., Any]) -> Callable[..., Any]:
    def end_run(*args: Any, **kwargs: Any) -> Any:
        attempt(lambda: end_mlflow(hooks.events, module), None)
        return plain(*args, **kwargs)

    return end_run


def _hook_mlflow(place: int) -> Hook:
    """Return a hook for a function of MLflow; `place` is the position of the argument `step` in its calls."""

    def hook(hooks: "TrackerHooks", module: ModuleType, plain: Callable[..., Any]) -> Callable[..., Any]:
        def log(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            step = kwargs.get("step", args[place] if len(args) > place else None)
            attempt(lambda: add_to_mlflow(hooks.events, module, kwargs.get("run_id"), step), None)
            return result

        return log

    return hook


def _hook_wandb_init(hooks: "TrackerHooks", module: ModuleType, plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: start_wandb(hooks.runs, RunCall(plain, args, kwargs))


def _hook_mlflow_start(hooks: "TrackerHooks", module: ModuleType, plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: start_mlflow(hooks.runs, module, RunCall(plain, args, kwargs))


def _hook_parameters(hooks: "TrackerHooks", module: ModuleType, plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: log_mlflow_parameters(hooks.runs, module, RunCall(plain, args, kwargs))


class TrackerCall(NamedTuple):
    """A function of a tracker, and the hook that takes its place."""

    module: str
    owner: str  # the class; empty for a function of the module
    function: str
    hook: Hook
    aliases: tuple[str, ...] = ()  # modules that hold the same function


_FLUENT = "mlflow.tracking.fluent"
_OF_FLUENT = ("mlflow", "mlflow.tracking")

TRACKER_CALLS = (
    TrackerCall("wandb.sdk.wandb_run", "Run", "log", _hook_wandb_log),
    TrackerCall("wandb.sdk.wandb_run", "Run", "finish", _hook_wandb_end),
    TrackerCall("wandb.sdk.wandb_init", "", "init", _hook_wandb_init, ("wandb", "wandb.sdk")),
    TrackerCall("torch.utils.tensorboard.writer", "SummaryWriter", "add_scalar", _hook_board),
    TrackerCall("torch.utils.tensorboard.writer", "SummaryWriter", "close", _hook_board_end),
    TrackerCall("tensorboardX.writer", "SummaryWriter", "add_scalar", _hook_board),
    TrackerCall("tensorboardX.writer", "SummaryWriter", "close", _hook_board_end),
    TrackerCall(_FLUENT, "", "log_metric", _hook_mlflow(2), _OF_FLUENT),
    TrackerCall(_FLUENT, "", "log_metrics", _hook_mlflow(1), _OF_FLUENT),
    TrackerCall(_FLUENT, "", "start_run", _hook_mlflow_start, _OF_FLUENT),
    TrackerCall(_FLUENT, "", "end_run", _hook_mlflow_end, _OF_FLUENT),
    TrackerCall(_FLUENT, "", "log_param", _hook_parameters, _OF_FLUENT),
    TrackerCall(_FLUENT, "", "log_params", _hook_parameters, _OF_FLUENT),
)


class TrackerHooks:
    """The hooked trackers of one rank. The node writes the job's figures for them to `folder`."""

    def __init__(self, run: str, folder: str) -> None:
        self.events, self.runs = TrackerEvents(folder), TrackerRuns(run)

    def hook_module(self, module: ModuleType) -> None:
        """Hook the functions of a tracker's module; do nothing about those that this version of it lacks."""
        for call in TRACKER_CALLS:
            if call.module == module.__name__:
                self._hook_call(module, call)

    def _hook_call(self, module: ModuleType, call: TrackerCall) -> None:
        owner = getattr(module, call.owner, None) if call.owner else module
        plain = vars(owner).get(call.function) if owner is not None else None
        if not callable(plain) or getattr(plain, "shows_holdfast", False):
            return
        hooked = functools.wraps(plain)(call.hook(self, module, plain))
        vars(hooked)["shows_holdfast"] = True
        setattr(owner, call.function, hooked)
        for name in call.aliases:
            other = sys.modules.get(name)
            if other is not None and vars(other).get(call.function) is plain:
                setattr(other, call.function, hooked)


def find_tracker_hooks() -> TrackerHooks | None:
    """Return the hooks of this rank; None if the job leaves trackers alone."""
    run, keeper = os.environ.get(TRACKED_RUN), os.environ.get(KEEPER)
    return TrackerHooks(run, os.path.dirname(keeper)) if run and keeper else None
