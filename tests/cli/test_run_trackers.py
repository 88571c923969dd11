"""Scripts that log to W&B, MLflow and TensorBoard: after a fault the same runs go on, and tell of the incident.

The real packages are used where they are installed: W&B offline, MLflow with SQLite. Small packages of the same form
stand for them in the first test.
"""

import json
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
        tell(run=id)
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


def test_trackers_are_left_alone_where_that_is_set(start: Start, told: Path) -> None:
    script = SCRIPT.format(setup=SETUP, close="")
    job = start("--set", "logs.trackers=false", script=script, HOLDFAST_TOLD_FILE=str(told))
    job.trains()
    job.finish()
    job.ends(0)
    assert read_lines(told) == [{"run": None, "generation": "1"}]
    assert "are logged to" not in job.text()
