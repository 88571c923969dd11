"""Small trackers of the form of W&B, MLflow and TensorBoard, which keep what they get."""

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from holdfast.client.training.tracker_hooks import TrackerHooks
from holdfast.wire.progress_environment import FIGURES

SENTENCE = "rank 2 on n2 was killed by SIGKILL at step 31; restarted in place from step 30"
METRICS = {"holdfast/incidents": 1.0, "holdfast/restarts": 1.0, "holdfast/lost_s": 4.5, "holdfast/ettr": 0.9}


def write_figures(folder: Path, version: int, generation: int = 1, **values: object) -> None:
    """Leave figures as the node does; files of other versions have other times."""
    told = {"generation": generation, "incidents": 1, "restarts": 1, "lost_s": 4.5, "ettr": 0.9, "notes": []} | values
    path = folder / FIGURES
    path.write_text(json.dumps(told))
    os.utime(path, (version, version))


class Config:
    items: dict[str, object]

    def __init__(self) -> None:
        object.__setattr__(self, "items", {"host": "a"})

    def _sanitize(self, key: str, value: object, allow: bool | None = None) -> tuple[str, object]:
        if not allow and self.items.get(key, value) != value:
            raise ValueError(f"Attempted to change value of key {key}")
        return key, value

    def __setattr__(self, key: str, value: object) -> None:
        self.items.update([self._sanitize(key, value)])


def play_wandb(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """Return modules like `wandb.sdk.wandb_run` and `wandb.sdk.wandb_init`."""
    run_module, init_module = ModuleType("wandb.sdk.wandb_run"), ModuleType("wandb.sdk.wandb_init")

    class Run:
        step = 0

        def __init__(self, **given: object) -> None:
            self.given, self.rows, self.alerts, self.config = given, list[Any](), list[Any](), Config()
            self.summary: dict[str, object] = {}
            self.is_over = False

        def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            self.rows.append((data, step, commit))

        def finish(self) -> None:
            self.is_over = True

        def alert(self, title: str, text: str, level: str) -> None:
            self.alerts.append((title, text, level))

    def init(
        project: str | None = None,
        id: str | None = None,
        resume: object = None,
        *,
        mode: str | None = None,
        settings: object = None,
        refuses: str = "",
    ) -> Run:
        if refuses and id:
            raise ValueError(refuses)
        return Run(project=project, id=id, resume=resume)

    vars(run_module)["Run"], vars(init_module)["init"] = Run, init
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID"):
        monkeypatch.delenv(name, raising=False)
    return run_module, init_module


def play_mlflow(monkeypatch: pytest.MonkeyPatch, store: dict[str, SimpleNamespace]) -> ModuleType:
    """Return a module like `mlflow.tracking.fluent`, whose runs are in `store`, by id."""
    fluent, entities, active = ModuleType("mlflow.tracking.fluent"), ModuleType("mlflow.entities"), list[Any]()
    numbers = itertools.count(len(store) + 1)

    class MlflowClient:
        def search_runs(self, experiments: list[str], wanted: str, max_results: int) -> list[Any]:
            found = (
                run for run in store.values() if f"tags.`holdfast.run` = '{run.tags.get('holdfast.run')}'" == wanted
            )
            return list(found)[:max_results]

        def log_batch(self, run_id: str, metrics: list[Any], tags: list[Any]) -> None:
            store[run_id].batches.append((metrics, dict(tags)))

    def start_run(
        run_id: str | None = None, run_name: str | None = None, nested: bool = False, tags: Any = None
    ) -> Any:
        if run_id is None:
            run_id = f"run{next(numbers)}"
            info = SimpleNamespace(run_id=run_id)
            store[run_id] = SimpleNamespace(info=info, name=run_name, tags=tags or {}, batches=[], params={})
        active.append(store[run_id])
        return store[run_id]

    def log_param(key: str, value: object) -> object:
        if active[-1].params.setdefault(key, value) != value:
            raise ValueError(f"Changing param values is not allowed. Param with key='{key}' was already logged")
        return value

    def end_run(status: str = "FINISHED") -> None:
        if active:
            active.pop().status = status

    functions: dict[str, Callable[..., Any] | type] = {
        "MlflowClient": MlflowClient,
        "start_run": start_run,
        "end_run": end_run,
        "active_run": lambda: active[-1] if active else None,
        "_get_experiment_id": lambda: "0",
        "log_metric": lambda key, value, step=None: active or fluent.start_run(),
        "log_param": log_param,
    }
    vars(fluent).update(functions)
    vars(entities)["Metric"], vars(entities)["RunTag"] = lambda *told: told[:2] + told[3:], lambda *told: told
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    return fluent


def play_board() -> ModuleType:
    module = ModuleType("tensorboardX.writer")

    class SummaryWriter:
        def __init__(self) -> None:
            self.scalars, self.texts = list[Any](), list[Any]()
            self.closed_with = -1  # how many texts it had then

        def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
            self.scalars.append((tag, scalar_value, global_step))

        def add_text(self, tag: str, text: str, global_step: int | None = None) -> None:
            self.texts.append((tag, text, global_step))

        def close(self) -> None:
            self.closed_with = len(self.texts)

    vars(module)["SummaryWriter"] = SummaryWriter
    return module


class Played:
    """The hooks of one rank's process, and the clock that they read."""

    def __init__(self, folder: Path, *modules: ModuleType, run: str = "job.mark") -> None:
        self.now, self.hooks = 0.0, TrackerHooks(run, str(folder))
        self.hooks.events._clock = lambda: self.now
        for module in modules:
            self.hooks.hook_module(module)

    def wait_for_delivery(self) -> None:
        thread = self.hooks.events._thread
        assert thread is not None
        thread.join(10)
        assert not thread.is_alive()
