"""A rank that starts again goes on with its run, unless somebody chose one; no refusal of a tracker ends it."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.client.played_trackers import Played, play_mlflow, play_wandb


def begin_wandb(monkeypatch: pytest.MonkeyPatch, folder: Path, generation: int, rank: int = 0, run: str = "j") -> Any:
    monkeypatch.setenv("HOLDFAST_GENERATION", str(generation))
    monkeypatch.setenv("RANK", str(rank))
    modules = play_wandb(monkeypatch)
    Played(folder, *modules, run=run)
    return modules[1].init


def test_wandb_has_one_run_for_each_rank_of_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    init = begin_wandb(monkeypatch, tmp_path, 1)
    first, second, other = init("p"), init(project="p"), init("q")
    assert first.given["resume"] == "allow" and first.given["project"] == "p"
    again = begin_wandb(monkeypatch, tmp_path, 2)
    assert again("p").given == first.given
    assert (again("q").given, again("p").given) == (other.given, second.given)
    ids = [run.given["id"] for run in (first, second, other)]
    ids.append(begin_wandb(monkeypatch, tmp_path, 1, rank=1)("p").given["id"])
    ids.append(begin_wandb(monkeypatch, tmp_path, 1, run="k")("p").given["id"])
    assert len(set(ids)) == 5 and all(isinstance(name, str) and len(name) == 16 for name in ids)


@pytest.mark.parametrize(
    "given",
    [
        {"id": "mine"},
        {"resume": "must"},
        {"resume": "auto"},
        {"mode": "disabled"},
        {"settings": {"run_id": "mine"}},
        {"settings": SimpleNamespace(resume="must")},
    ],
)
def test_a_run_of_wandb_that_the_script_chose_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, Any]
) -> None:
    run = begin_wandb(monkeypatch, tmp_path, 2)(**given)
    assert run.given == {"project": None, "id": given.get("id"), "resume": given.get("resume")}


@pytest.mark.parametrize("name", ["WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID"])
def test_a_run_of_wandb_that_the_user_chose_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    init = begin_wandb(monkeypatch, tmp_path, 2)
    monkeypatch.setenv(name, "mine")
    assert init().given["id"] is None


def test_a_run_that_is_under_way_is_not_resumed_once_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    init = begin_wandb(monkeypatch, tmp_path, 1)
    vars(sys.modules["wandb"])["run"] = init()
    assert init().given["id"] is None


def test_what_wandb_refuses_is_asked_for_without_us(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init = begin_wandb(monkeypatch, tmp_path, 2)
    assert init(refuses="the run was deleted").given["id"] is None
    assert re.search(r"^holdfast: W&B .*\bthe run was deleted\b", capsys.readouterr().err, re.MULTILINE)
    with pytest.raises(TypeError, match="unexpected"):
        init(nonsense=1)


def test_a_resumed_run_of_wandb_takes_other_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = begin_wandb(monkeypatch, tmp_path, 1)().config
    with pytest.raises(ValueError, match="host"):
        config.host = "b"
    config = begin_wandb(monkeypatch, tmp_path, 2)().config
    config.host = "b"
    assert config.items == {"host": "b"}


Store = dict[str, SimpleNamespace]


def begin_mlflow(
    monkeypatch: pytest.MonkeyPatch, folder: Path, store: Store, generation: int, rank: int = 0
) -> ModuleType:
    monkeypatch.setenv("HOLDFAST_GENERATION", str(generation))
    monkeypatch.setenv("RANK", str(rank))
    fluent = play_mlflow(monkeypatch, store)
    Played(folder, fluent)
    return fluent


def test_mlflow_resumes_the_run_with_our_tag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store: Store = {}
    first = begin_mlflow(monkeypatch, tmp_path, store, 1).start_run(run_name="a", tags={"mine": "1"})
    other = begin_mlflow(monkeypatch, tmp_path, store, 1, rank=1).start_run()
    assert first.tags["mine"] == "1" and first.tags["holdfast.run"] != other.tags["holdfast.run"]
    assert begin_mlflow(monkeypatch, tmp_path, store, 2).start_run(run_name="b") is first
    assert begin_mlflow(monkeypatch, tmp_path, store, 2, rank=1).start_run() is other
    assert first.name == "a" and len(store) == 2
    assert begin_mlflow(monkeypatch, tmp_path, store, 1).start_run() not in (first, other)


def test_a_run_of_mlflow_that_somebody_chose_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store: Store = {}
    fluent = begin_mlflow(monkeypatch, tmp_path, store, 1)
    assert fluent.start_run(nested=True).tags == {}
    assert begin_mlflow(monkeypatch, tmp_path, store, 2).start_run("run1") is store["run1"]
    fluent = begin_mlflow(monkeypatch, tmp_path, store, 2)
    monkeypatch.setenv("MLFLOW_RUN_ID", "x")
    assert fluent.start_run().tags == {}


def test_changed_parameters_do_not_end_a_resumed_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store: Store = {}
    fluent = begin_mlflow(monkeypatch, tmp_path, store, 1)
    run = fluent.start_run()
    fluent.log_param("host", "a")
    with pytest.raises(ValueError, match="Changing"):
        fluent.log_param("host", "b")
    fluent = begin_mlflow(monkeypatch, tmp_path, store, 2)
    fluent.start_run()
    assert fluent.log_param("host", "b") is None
    assert run.params == {"host": "a"}
    assert re.search(r"^holdfast: .*\bMLflow\b.*: Changing param\b", capsys.readouterr().err, re.MULTILINE)
