"""Lets a restarted rank continue its run of W&B or MLflow, unless the script or its user chose a run.

A run belongs to one rank of one `holdfast run`. It is identified by its place among the runs that the script starts and
by its project or experiment. For W&B, an id is computed from both. MLflow makes ids itself, so a tag is set on the run,
and a later generation looks for the tag. If a tracker refuses our arguments, the script's call is made unchanged.
"""

import hashlib
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from holdfast.client.training.stderr_sentence import say
from holdfast.client.training.tracker_events import MLFLOW, WANDB, attempt
from holdfast.wire.progress_environment import GENERATION

TAG = "holdfast.run"
_CHANGED = "hanging param"  # MLflow: "Changing param values is not allowed"
# A run that is chosen by one of these is not ours to choose.
_WANDB_VARIABLES = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM", "WANDB_SWEEP_ID")
_WANDB_ARGUMENTS = ("id", "resume_from", "fork_from")
_WANDB_SETTINGS = ("run_id", "resume", "resume_from", "fork_from", "sweep_id")
_GROUPING = ("entity", "project", "group", "job_type")  # a name may hold the time


class TrackerRuns:
    """The runs that this rank has started, by tracker."""

    def __init__(self, run: str) -> None:
        self._run, self._pid = run, os.getpid()
        self._started: dict[tuple[object, ...], int] = {}
        self.resumed: set[str] = set()  # ids of MLflow's runs that an earlier generation began

    @property
    def is_later_generation(self) -> bool:
        return int(os.environ.get(GENERATION, "0")) > 1

    def name_next(self, *place: object) -> str:
        """Return a name for the next run in `place`. Counting makes the names the same in every generation."""
        count = self._started[place] = self._started.get(place, 0) + 1
        told = "\0".join(map(str, (self._run, os.environ.get("RANK", "0"), count, *place)))
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def is_rank(self) -> bool:
        """Return whether this process is the rank itself; its children have runs of their own."""
        return os.getpid() == self._pid


def _start_run(tracker: str, call: "RunCall", choose: Callable[[], dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """Start a run with the arguments that `choose` returns; return the run and these arguments. If the tracker refuses
    the arguments or `choose` returns none, start the run as the script asked; return the run and {}."""
    nothing: dict[str, Any] = {}
    if chosen := attempt(choose, nothing):
        try:
            return call.plain(**chosen), chosen
        except Exception as e:
            say(f"{tracker} does not resume this rank's run, and gets another one: {e!r:.300}")
    return call.plain(*call.args, **call.kwargs), {}


class RunCall(NamedTuple):
    """A call of the script that starts a run."""

    plain: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def name_arguments(self) -> dict[str, Any]:
        return inspect.signature(self.plain).bind_partial(*self.args, **self.kwargs).arguments


def start_wandb(runs: TrackerRuns, call: RunCall) -> Any:
    """Call W&B's `init` so that it resumes this rank's run, or begins it."""
    run, chosen = _start_run(WANDB, call, lambda: _choose_wandb_run(runs, call.name_arguments()))
    if chosen and runs.is_later_generation:
        attempt(lambda: _free_config(run.config), None)
    return run


def _choose_wandb_run(runs: TrackerRuns, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which the script's call resumes or begins this rank's run. Return {} to leave the call
    as it is, for example because the script has chosen a run."""
    settings = given.get("settings")
    preset = (
        settings if isinstance(settings, dict) else {name: getattr(settings, name, None) for name in _WANDB_SETTINGS}
    )
    chosen = (
        any(os.environ.get(name) for name in _WANDB_VARIABLES)
        or any(given.get(name) for name in _WANDB_ARGUMENTS)
        or given.get("resume") not in (None, "allow")
        or given.get("mode") in ("disabled", "shared")
        or any(preset.get(name) for name in _WANDB_SETTINGS)
    )
    active = getattr(sys.modules.get("wandb"), "run", None)  # it may be returned as it is
    if chosen or active is not None or not runs.is_rank():
        return {}
    return given | {"id": runs.name_next(*(given.get(name) for name in _GROUPING)), "resume": "allow"}


def _free_config(config: Any) -> None:
    """Let a resumed run change config values, such as a host's name; otherwise W&B would raise an error."""
    plain = config._sanitize
    object.__setattr__(config, "_sanitize", lambda key, value, allow=None: plain(key, value, True))


def start_mlflow(runs: TrackerRuns, fluent: ModuleType, call: RunCall) -> Any:
    """Call MLflow's `start_run` so that it resumes this rank's run, or begins one that later ranks can find."""
    run, chosen = _start_run(MLFLOW, call, lambda: _choose_mlflow_run(runs, fluent, call.name_arguments()))
    if chosen.get("run_id"):
        runs.resumed.add(chosen["run_id"])
    return run


def _choose_mlflow_run(runs: TrackerRuns, fluent: ModuleType, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which the script's call resumes this rank's run, or begins a run that a later
    generation can find. Return {} to leave the call as it is, for example because the script has chosen a run."""
    chosen = given.get("run_id") or given.get("nested") or given.get("parent_run_id") or os.environ.get("MLFLOW_RUN_ID")
    if chosen or fluent.active_run() is not None or not runs.is_rank():
        return {}
    experiment = str(given.get("experiment_id") or fluent._get_experiment_id())
    name = runs.name_next(experiment)
    if runs.is_later_generation:
        found = fluent.MlflowClient().search_runs([experiment], f"tags.`{TAG}` = '{name}'", max_results=1)
        if found:
            return given | {"run_id": found[0].info.run_id, "run_name": None}
    return given | {"tags": {**(given.get("tags") or {}), TAG: name}}


def log_mlflow_parameters(runs: TrackerRuns, fluent: ModuleType, call: RunCall) -> Any:
    """Log parameters. If MLflow refuses new values for a resumed run, keep the old values and print a sentence."""
    try:
        return call.plain(*call.args, **call.kwargs)
    except Exception as e:
        refused = str(e)
        if not attempt(lambda: fluent.active_run().info.run_id in runs.resumed, False) or _CHANGED not in refused:
            raise
    say(f"MLflow's resumed run keeps its first parameters: {refused.partition(chr(10))[0]:.300}")
    return None
