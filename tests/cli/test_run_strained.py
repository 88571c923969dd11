"""A machine that is hot, or whose driver does not answer: it goes only if the job suffers at the same time."""

import json
from pathlib import Path

import pytest

from holdfast.chaos import hardware_faults
from holdfast.chaos.hardware_faults import NVML, READINGS
from holdfast.model.detector_alarm import Kind
from tests.cli.conftest import Start
from tests.cli.driver import ROOT, TRAIN, Job
from tests.cli.test_run_health import node_of
from tests.cli.test_run_state import TRAIN as SAVED
from tests.cli.test_run_state import backed

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FAKES = f"{Path(hardware_faults.__file__).parent / 'fakes'}:{ROOT}"
# The first generation stands while there is a file `stand`; the next one resumes, and does not.
STANDING = TRAIN.replace(
    "    time.sleep(0.02)\n",
    """    time.sleep(0.02)
    while first == 0 and os.path.exists(f"{folder}/stand"):
        time.sleep(0.02)
""",
).replace("while not", "first = step\nwhile not", 1)
# All ranks are slow alike, as they are where one GPU is: nobody comes late to a collective.
SLOWED = SAVED.replace("slow-{os.environ['RANK']}-{first}", "slow-{first}")


def on_machines(start: Start, folder: Path, *flags: str, script: str) -> Job:
    """Start a job whose nodes are machines with a GPU each, two and a standby."""
    for node in ("n0", "n1", "n2", "n3"):
        (folder / node / "dev").mkdir(parents=True)
    quick = ("--set", "health.gpu_s=0.2", "--set", f"health.root={folder}/{{node}}")
    job = start("--nnodes=2", "--standbys=1", *quick, *flags, script=script, **{NVML: str(folder), "PYTHONPATH": FAKES})
    job.trains()
    job.until(lambda: "ready" in [node["role"] for node in job.status()["nodes"]], "a standby", patience_s=100)
    return job


def set_reading(folder: Path, node: str, reading: str) -> None:
    part = folder / node / ".nvml.json"
    part.write_text(json.dumps(READINGS[reading]))
    part.replace(folder / node / "nvml.json")


def test_a_driver_that_does_not_answer_counts_once_the_job_stands(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "machines"
    job = on_machines(start, root, "--set", "health.deadline_s=1", script=STANDING)
    bad = node_of(job, 1)
    set_reading(root, bad, "hung")
    job.says(f"{bad} has not answered for ")
    at = job.status()["step"]
    job.until(lambda: job.status()["step"] > at + 50, "steps, which need no driver here")
    assert job.status()["generation"] == 1
    (tmp_path / "stand").touch()
    job.trains(generation=2)
    assert node_of(job, 1) != bad
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.klass, record.evicted) == ("health", "gpu_driver_gsp_fault", (bad,))
    assert job.check_replay() > 5


def test_a_hot_machine_counts_once_the_job_is_slower(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "machines"
    # Of what ranks tell of collectives nothing is to be heard here: a slow GPU does not show there.
    quick = ("--set", "slow.pace_s=3", "--set", "slow.cost_s=6", "--set", "slow.margin=0.9")
    job = on_machines(start, root, *quick, script=SLOWED)
    job.until(lambda: backed(job), "copies on peers")
    bad, at = node_of(job, 1), job.status()["step"]
    set_reading(root, bad, "hot")
    job.says(f"{bad} slows GPU 0 down for heat or power at 95 °C")
    job.until(lambda: job.status()["step"] > at + 200, "steps at the usual pace")
    assert not job.alarms(Kind.SLOW) and job.status()["generation"] == 1
    (tmp_path / "slow-1").touch()
    job.trains(generation=2)
    assert node_of(job, 1) != bad
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.klass, record.evicted) == ("slow", "gpu_thermal_power", (bad,))
    assert record.resumed_from is not None and record.good_step - record.resumed_from <= 1
