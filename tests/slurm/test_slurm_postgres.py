"""On a real Slurm: the login host is lost, and another host goes on with the run, whose journal is in Postgres."""

import os
import signal

import psutil
import pytest

from tests.cli.test_run_postgres import stores_of
from tests.slurm.lab import LOGIN_TOO
from tests.slurm.slurm_job import StartSlurm, start_slurm

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start_slurm"]


def test_another_host_goes_on_with_the_run_and_ranks_do_not_notice(
    start_slurm: StartSlurm, shared_postgres: str
) -> None:
    job = start_slurm("--nnodes", "2", "--standbys", "1", "--journal", shared_postgres)
    job.trains()
    job.standby_waits()
    before = job.status()["step"]
    sruns = [psutil.Process(record.srun) for record in job.records().values()]
    watching = [pid for srun in sruns for pid in (srun.pid, *(child.pid for child in srun.children()))]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # all at once: an srun that sees another die ends its step
        for pid in (*watching, job.process.pid, job.controller(), *stores_of(job)):
            os.kill(pid, number)
    assert not (job.run_dir / "journal.db").exists()
    job.at = LOGIN_TOO
    job.start("--resume", str(job.run_dir))
    job.trains()
    job.until(lambda: job.status()["step"] > before, "more steps")
    job.standby_waits()
    assert job.status()["generation"] == 1, "ranks go on"
    job.lab.power_off(job.host_of_rank(1))
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    assert len(job.report().incidents) == 1
    job.until(lambda: not job.queue(), "an empty queue")
