"""On a real Slurm: one job for the start, a machine without power, a refill, and an end that leaves nothing."""

import pytest

from tests.slurm.slurm_job import StartSlurm, start_slurm

pytestmark = pytest.mark.e2e
__all__ = ["start_slurm"]


def test_a_host_without_power_is_replaced_by_a_standby_and_a_refill(start_slurm: StartSlurm) -> None:
    job = start_slurm("--nnodes", "2", "--standbys", "1", "--slurm", "time=30")
    job.trains()
    [gang] = job.queue()
    assert job.lab.call("squeue", "-h", "-j", gang, "-o", "%D|%K|%V") and len(job.records()) == 3
    job.standby_waits()
    lost = job.host_of_rank(1)
    job.lab.power_off(lost)
    job.trains(generation=2)
    refill = job.until(lambda: job.records().get("n3"), "a refill")
    assert refill.job != int(gang)
    job.until(lambda: len(job.queue()) == 2, "a job of its own for it")
    assert lost in job.lab.call("scontrol", "show", "job", str(job.records()["n3"].job)).split("ExcNodeList=")[1]
    job.standby_waits()
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert "silent" in record.reason or "lost" in record.reason
    job.until(lambda: not job.queue(), "an empty queue")
    job.check_replay()
