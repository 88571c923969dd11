"""Scripts that log to W&B, MLflow and TensorBoard: after a fault the same runs go on, and tell of the incident.

The real packages are used where they are installed: W&B offline, MLflow with SQLite. Small packages of the same form
stand for them in the first test.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Start
from tests.cli.driver import Job

pytestmark = pytest.mark.e2e

# It trains, and logs to what it is given; `log` is a function of a step.
SCRIPT = """
import os, sys, time
import torch
folder = sys.argv[1]
{setup}
import holdfast
step = 0
while not os.path.exists(f"{{folder}}/finish"):
    time.sleep(0.02)
    step += 1
    log(step)
    holdfast.step(step, loss=1 / step)
{close}
"""

PLAYED = {
    "wandb/__init__.py": "run = None\nfrom wandb.sdk.wandb_init import init\n",
    "wandb/sdk/__init__.py": "",
    "wandb/sdk/wandb_init.py": """
from wandb.sdk.wandb_run import Run
def init(project=None, id=None, resume=None):
    return Run(id)
""",
    "wandb/sdk/wandb_run.py": """
import json, os
def tell(**told):
    with open(os.environ["HOLDFAST_TOLD_FILE"], "a") as file:
        file.write(json.dumps(told | {"generation": os.environ["HOLDFAST_GENERATION"]}) + "\\n")
class Run:
    def __init__(self, id):
        self.summary = {}
        tell(run=id)
    def finish(self):
        tell(summary=self.summary)
    def log(self, data, step=None):
        told = {name: value for name, value in data.items() if name.startswith("holdfast/")}
        told and tell(row=told)
    def alert(self, title, text, level):
        tell(alert=text)
""",
}
SETUP = "import wandb\nrun = wandb.init(project='p')\nlog = lambda step: run.log({'loss': 1.0}, step=step)"


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """Where the played W&B writes down what it gets."""
    for name, text in PLAYED.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "told.jsonl"


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_and_wait(job: Job) -> None:
    job.trains()
    job.kill(job.rank(0))
    job.trains(generation=2)


def test_a_run_goes_on_after_a_fault_and_tells_of_it(start: Start, told: Path) -> None:
    script = SCRIPT.format(setup=SETUP, close="")
    job = start("--nproc-per-node", "2", script=script, HOLDFAST_TOLD_FILE=str(told))
    job.says("incidents, restarts and ETTR are logged to W&B, too")
    kill_and_wait(job)
    job.until(lambda: [line for line in read_lines(told) if "alert" in line], "an alert")
    job.finish()
    job.ends(0)
    lines = read_lines(told)
    first, second = ({line["run"] for line in lines if "run" in line and line["generation"] == g} for g in ("1", "2"))
    assert first == second and len(first) == 2  # one run for each rank
    rows = [line["row"] for line in lines if "row" in line and line["generation"] == "2"]
    assert any("killed by SIGKILL" in row.get("holdfast/incident", "") for row in rows)
    assert rows[-1]["holdfast/incidents"] == rows[-1]["holdfast/restarts"] == 1 == len(job.report().incidents)
    assert 0.0 < rows[-1]["holdfast/ettr"] < 1.0


def test_a_run_that_ends_soon_after_a_restart_tells_of_the_incident(start: Start, told: Path) -> None:
    """Its second generation makes two steps: by then nobody has a sentence about what was before."""
    loop = 'while not os.path.exists(f"{{folder}}/finish"):'
    assert loop in SCRIPT
    few = "while step < (2 if os.environ['HOLDFAST_GENERATION'] == '2' else 10**9):"
    script = SCRIPT.replace(loop, few).format(setup=SETUP, close="run.finish()")
    job = start("--nproc-per-node", "1", script=script, HOLDFAST_TOLD_FILE=str(told))
    job.says("incidents, restarts and ETTR are logged to W&B, too")
    job.kill(job.rank(0))
    job.ends(0)
    [incident] = job.report().incidents
    lines = read_lines(told)
    [summary] = [line["summary"] for line in lines if "summary" in line]
    assert summary["holdfast/incidents"] == 1 and incident.sentence in summary["holdfast/incident"]
    assert [line["alert"] for line in lines if "alert" in line] == [incident.sentence]


def test_trackers_are_left_alone_where_that_is_set(start: Start, told: Path) -> None:
    script = SCRIPT.format(setup=SETUP, close="")
    job = start("--set", "logs.trackers=false", script=script, HOLDFAST_TOLD_FILE=str(told))
    job.trains()
    job.finish()
    job.ends(0)
    assert read_lines(told) == [{"run": None, "generation": "1"}]
    assert not any(name in job.text() for name in ("W&B", "MLflow", "TensorBoard"))


# The rank logs until it has seen the figures of its second generation, and what it logged is on the disk.
def run_real(start: Start, setup: str, close: str, *, is_logged: Callable[[], object]) -> None:
    job = start(script=SCRIPT.format(setup=setup, close=close))
    job.patience_s = 200.0  # a tracker takes long to import
    kill_and_wait(job)
    job.until(is_logged, "figures of the second generation")
    job.finish()
    job.ends(0)
    assert len(job.report().incidents) == 1
    assert "Traceback" not in job.text()


def test_the_real_wandb(start: Start, tmp_path: Path) -> None:
    """Offline: each generation has a folder of its own, under one id. A changed configuration is no error."""
    pytest.importorskip("wandb", reason="no wandb: only a played one is tried")
    setup = """
import wandb
generation = os.environ["HOLDFAST_GENERATION"]
run = wandb.init(project="p", dir=folder, mode="offline", config={"generation": generation})
run.config.host = generation
log = lambda step: run.log({"train/loss": 1 / step})
"""

    def read_rows() -> list[bytes]:
        return [path.read_bytes() for path in (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")]

    def is_logged() -> bool:
        return any(b"killed by SIGKILL" in rows for rows in read_rows())

    run_real(start, setup, "run.finish()", is_logged=is_logged)
    [rows] = [rows for rows in read_rows() if b"killed by SIGKILL" in rows]
    assert b"holdfast/ettr" in rows and b"holdfast/incident" in rows and b"holdfast: incident 1" in rows  # an alert
    ids = {path.name.rpartition("-")[2] for path in (tmp_path / "wandb").glob("offline-run-*")}
    assert len(ids) == 1 and len(read_rows()) == 2


@pytest.mark.filterwarnings("ignore")  # of its database
def test_the_real_mlflow(start: Start, tmp_path: Path) -> None:
    """With SQLite: one run, with the metrics of both generations. A changed parameter is no error."""
    mlflow = pytest.importorskip("mlflow", reason="no mlflow: only a played one is tried")
    store = f"sqlite:///{tmp_path}/mlflow.db"
    setup = f"""
import mlflow
mlflow.set_tracking_uri("{store}")
mlflow.start_run(run_name=os.environ["HOLDFAST_GENERATION"])
mlflow.log_params({{"host": os.environ["HOLDFAST_GENERATION"], "lr": 1}})
log = lambda step: mlflow.log_metric("train/loss", 1 / step, step=step)
"""
    client = mlflow.MlflowClient(store)

    def read_runs() -> list[Any]:
        return list(client.search_runs(["0"]))

    def is_logged() -> bool:
        return any("holdfast.incident.1" in run.data.tags for run in read_runs())

    run_real(start, setup, "", is_logged=is_logged)
    [run] = read_runs()
    assert "killed by SIGKILL" in run.data.tags["holdfast.incident.1"]
    assert (run.info.run_name, run.info.status) == ("1", "FINISHED")
    assert run.data.params == {"host": "1", "lr": "1"}
    assert run.data.metrics["holdfast/restarts"] == run.data.metrics["holdfast/incidents"] == 1
    assert 0 < run.data.metrics["holdfast/ettr"] < 1
    steps = [one.step for one in client.get_metric_history(run.info.run_id, "train/loss")]
    assert steps.count(1) == 2, "both generations log to it"


def test_the_real_tensorboard(start: Start, tmp_path: Path) -> None:
    """Both generations write to the folder that the script names."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard: only a played one is tried"
    )
    setup = """
from torch.utils.tensorboard import SummaryWriter
board = SummaryWriter(f"{folder}/board", flush_secs=1)
log = lambda step: board.add_scalar("train/loss", 1 / step, step)
"""

    def read_events() -> Any:
        found = accumulator.EventAccumulator(f"{tmp_path}/board", size_guidance={"tensors": 0, "scalars": 0})
        found.Reload()
        return found

    def read_texts() -> list[str]:
        events = read_events()
        if "holdfast/incident/text_summary" not in events.Tags()["tensors"]:
            return []
        return [one.tensor_proto.string_val[0].decode() for one in events.Tensors("holdfast/incident/text_summary")]

    run_real(start, setup, "board.close()", is_logged=read_texts)
    [text] = read_texts()
    assert text.startswith("incident 1: ") and "killed by SIGKILL" in text
    restarts = [one.value for one in read_events().Scalars("holdfast/restarts")]
    assert restarts[-1] == 1.0 and restarts == sorted(restarts), "the first rank may be killed before it has figures"
    assert len(list((tmp_path / "board").glob("events.*"))) == 2
