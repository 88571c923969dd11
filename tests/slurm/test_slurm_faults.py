"""On a real Slurm, every way to lose a node: the job comes back with the very weights of an undisturbed one."""

import math
import time
from pathlib import Path

import pytest

from tests.cli.test_run_state import TRAIN, said
from tests.slurm.slurm_job import SlurmJob, StartSlurm, start_slurm

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]
__all__ = ["start_slurm"]

STEPS = "400"
_calm: dict[str, str] = {}  # what an undisturbed job ended with, by its number of steps
_starts_s: list[float] = []  # how long its start took


@pytest.fixture
def calm_weights(start_slurm: StartSlurm, tmp_path: Path) -> str:
    """The weights of an undisturbed job, made once by this process."""
    if STEPS not in _calm:
        began_at = time.monotonic()
        job = start_slurm("--nnodes", "2", script=TRAIN, name="calm", HOLDFAST_STEPS=STEPS)
        job.trains()
        _starts_s.append(time.monotonic() - began_at)
        job.ends(0, patience_s=200)
        _calm[STEPS] = weights(job)
        job.run_dir.rename(tmp_path / "calm-run")
    return _calm[STEPS]


def limit_min(least: int) -> int:
    """Minutes for a job that has to train for a while before they are over, however slow this machine is today; at
    least so many."""
    return max(least, math.ceil((2 * max(_starts_s) + 60) / 60) + 1)


def weights(job: SlurmJob) -> str:
    """What both ranks printed at their end, which is the same."""
    found = {words[0] for words in said(job, "weights")}
    assert len(found) == 1, job.story()
    return found.pop()


def begin(start_slurm: StartSlurm, tmp_path: Path, *flags: str, **env: str) -> SlurmJob:
    """A job of two nodes and a standby that has copies of its state on peers, and its checkpoints on a shared disk."""
    env |= {"HOLDFAST_STORE": str(tmp_path / "store"), "HOLDFAST_STEPS": STEPS}
    job = start_slurm("--nnodes", "2", "--standbys", "1", *flags, script=TRAIN, inside=(), **env)
    job.trains()
    job.standby_waits()
    job.until(lambda: job.status()["floor"] > 3, "copies on peers")
    return job


def check_end(job: SlurmJob, expected: str) -> None:
    job.ends(0, patience_s=200)
    assert weights(job) == expected
    job.until(lambda: not job.queue(), "an empty queue")
    job.check_replay()


def hears_of(job: SlurmJob, host: str) -> None:
    """Whenever Slurm finds out that this host does not answer, people are told: by the incident, or after it."""
    job.until(lambda: host in "\n".join(job.sentences()), "what Slurm says of the lost host")


def test_power_off(start_slurm: StartSlurm, tmp_path: Path, calm_weights: str) -> None:
    job = begin(start_slurm, tmp_path)
    lost = job.host_of_rank(1)
    job.lab.lose_power(lost)
    job.trains(generation=2)
    hears_of(job, lost)
    check_end(job, calm_weights)
    [record] = job.report().incidents
    assert record.evicted and record.resumed_from


def test_a_cut_cable_and_its_return(start_slurm: StartSlurm, tmp_path: Path, calm_weights: str) -> None:
    job = begin(start_slurm, tmp_path)
    lost = job.host_of_rank(1)
    job.lab.cut(lost)
    job.trains(generation=2)
    hears_of(job, lost)
    assert job.lab.pids(lost, "job.py"), "the old rank runs on beside its replacement"
    job.lab.heal(lost)
    job.until(lambda: not job.lab.pids(lost, "job.py"), "the end of the old rank")
    check_end(job, calm_weights)
    assert len(job.report().incidents) == 1


def test_scancel_of_the_job_of_the_start(start_slurm: StartSlurm, tmp_path: Path, calm_weights: str) -> None:
    job = begin(start_slurm, tmp_path)
    [gang] = job.queue()
    job.lab.call("scancel", gang)
    job.trains(generation=2)
    assert gang not in job.queue()
    assert f"job {gang} was cancelled" in job.text() and "time limit" not in job.text()
    check_end(job, calm_weights)


def test_scancel_of_one_node(start_slurm: StartSlurm, tmp_path: Path, calm_weights: str) -> None:
    job = begin(start_slurm, tmp_path)
    node = job.node_of_rank(1)
    steps = job.lab.call("squeue", "-h", "-s", "-o", "%i|%j").split()
    [step] = [step.split("|")[0] for step in steps if step.endswith(f"|holdfast-{node}")]
    job.lab.call("scancel", step)
    job.trains(generation=2)
    check_end(job, calm_weights)


def test_a_drain_leaves_the_job_alone_and_keeps_refills_away(
    start_slurm: StartSlurm, tmp_path: Path, calm_weights: str
) -> None:
    job = begin(start_slurm, tmp_path)
    drained = job.host_of_rank(1)
    job.lab.call("scontrol", "update", f"NodeName={drained}", "State=DRAIN", "Reason=look")
    assert job.status()["generation"] == 1
    job.lab.power_off(drained)
    job.trains(generation=2)
    job.until(lambda: (found := job.records().get("n3")) and found.host not in ("", drained), "a refill elsewhere")
    check_end(job, calm_weights)


def test_preemption_moves_the_seat_before_the_end(start_slurm: StartSlurm, tmp_path: Path, calm_weights: str) -> None:
    for rank in (0, 1):
        (tmp_path / f"slow-{rank}-1").touch()  # it trains until others have come
    job = begin(start_slurm, tmp_path, "--slurm", "time=30 exclusive")
    words = ("--parsable", "-p", "urgent", "-w", job.host_of_rank(1), "--time=9", "-o", "/dev/null")
    urgent = job.lab.call("sbatch", *words, "--wrap", "sleep 500").strip()
    job.says("takes n", patience_s=120)
    job.trains(generation=2)
    job.lab.call("scancel", urgent)
    check_end(job, calm_weights)
    assert job.report().changes and not job.report().incidents, "a planned restart, and no incident"
