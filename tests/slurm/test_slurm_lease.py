"""On a real Slurm: a controller that slept, and a run directory whose controller moves to another host."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from holdfast.fleet.slurm_node_file import read_records
from tests.cli.driver import gone
from tests.cli.test_run_postgres import stores_of
from tests.slurm.lab import LOGIN, LOGIN_TOO
from tests.slurm.slurm_job import SlurmJob, StartSlurm, start_slurm

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start_slurm"]


def hide(job: SlurmJob, pid: int) -> None:
    """Keep a process of this machine from the second login host: hosts do not see one another's."""
    empty = job.folder / "empty"
    empty.mkdir(exist_ok=True)
    job.lab.call("mount", "--bind", str(empty), f"/proc/{pid}", on=LOGIN_TOO)


def part_sockets(job: SlurmJob) -> None:
    """Keep those who come later from the sockets of a controller: one host cannot reach another's by the file."""
    for name in ("controller.sock", "store.sock"):
        (job.run_dir / name).unlink(missing_ok=True)


def resume_too(start: StartSlurm, first: SlurmJob) -> SlurmJob:
    """Another front of the run, at the second login host."""

    class Second(SlurmJob):
        def start(self, *words: str) -> None:
            self.at = LOGIN_TOO
            super().start(*words)

    start.jobs.append(Second(start.lab, start.folder, "--resume", str(first.run_dir), env=start.env, name="second"))
    return start.jobs[-1]


def steps(job: SlurmJob) -> list[str]:
    """The names of all steps that are nodes."""
    found = job.lab.call("squeue", "-h", "-s", "-o", "%j").split()
    return sorted(name for name in found if name.startswith("holdfast-n"))


def test_a_controller_that_slept_starts_no_step_writes_no_record_and_ends(
    start_slurm: StartSlurm, shared_postgres: str
) -> None:
    first = start_slurm("--nnodes", "2", "--standbys", "1", "--journal", shared_postgres)
    first.trains()
    first.standby_waits()
    before, asleep = first.status()["step"], first.controller()
    standby = next(one["node"] for one in first.status()["nodes"] if one["role"] == "ready")
    for pid in (first.process.pid, asleep):
        os.kill(pid, signal.SIGSTOP)
    hide(first, asleep)
    part_sockets(first)
    second = resume_too(start_slurm, first)
    second.until(lambda: second.status().get("step", -1) > before, "more steps, with another controller")
    assert second.status()["generation"] == 1, "ranks go on"
    second.lab.power_off(second.host_of(standby))
    second.until(lambda: (found := second.records().get("n3")) and found.srun, "a refill by the second one")
    second.standby_waits()
    for pid in (asleep, first.process.pid):
        os.kill(pid, signal.SIGCONT)
    first.until(lambda: gone(asleep), "the end of the one that slept")
    first.ends(0)
    records = read_records(second.run_dir / "slurm")
    assert (records.epoch, records.host) == (2, LOGIN_TOO) and "n3" in records.nodes
    names = [name for name in steps(second) if name != f"holdfast-{standby}"]
    assert len(names) == len(set(names)) == 3, "one step for each node"
    assert second.status()["generation"] == 1
    second.finish()
    second.ends(0)
    second.until(lambda: not second.queue(), "an empty queue")
    second.until(lambda: not stores_of(second), "the end of the first host's store, with its last rank", patience_s=20)


def test_without_a_database_the_lease_in_the_run_directory_decides_which_host_goes_on(start_slurm: StartSlurm) -> None:
    job = start_slurm("--nnodes", "2", "--standbys", "1")
    job.trains()
    job.standby_waits()
    names = {path.name for path in job.run_dir.iterdir()}
    assert not {"journal.db-wal", "journal.db-shm"} & names and "lease" in names
    hide(job, job.controller())
    words = (sys.executable, "-m", "holdfast.cli", "run", "--resume", str(job.run_dir))
    told = job.lab.words(*words, on=LOGIN_TOO, cwd=str(job.folder))
    refused = subprocess.run(told, env=start_slurm.env, capture_output=True, text=True, check=False, timeout=120)
    assert refused.returncode == 2 and f"{LOGIN} has " in refused.stderr, refused
    before = job.status()["step"]
    sruns = [psutil.Process(record.srun) for record in job.records().values()]
    watching = [pid for srun in sruns for pid in (srun.pid, *(child.pid for child in srun.children()))]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in (*watching, job.process.pid, job.controller(), *stores_of(job)):
            os.kill(pid, number)
    job.at = LOGIN_TOO
    job.start("--resume", str(job.run_dir))
    job.says(f"{LOGIN} had this run's controller; waiting")
    job.trains()
    job.until(lambda: job.status()["step"] > before, "more steps")
    assert job.status()["generation"] == 1, "ranks go on"
    records = read_records(Path(job.run_dir) / "slurm")
    assert (records.epoch, records.host) == (2, LOGIN_TOO)
    job.finish()
    job.ends(0)
    job.until(lambda: not job.queue(), "an empty queue")
    job.check_replay()
