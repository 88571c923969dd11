"""On a real Slurm: one job for the start, a machine without power, a refill, and an end that leaves nothing."""

import pytest

from holdfast.fleet.slurm_replies import expand_hosts
from tests.slurm.slurm_job import StartSlurm, start_slurm

pytestmark = pytest.mark.e2e
__all__ = ["start_slurm"]


def test_a_host_without_power_is_replaced_by_a_standby_and_a_refill(start_slurm: StartSlurm) -> None:
    job = start_slurm("--nnodes", "2", "--standbys", "1", "--slurm", "time=30")
    job.trains()
    [gang] = job.queue()
    assert job.lab.call("squeue", "-h", "-j", gang, "-o", "%D").strip() == "3", "one job of N + S nodes"
    job.standby_waits()
    node = job.node_of_rank(1)
    lost = job.host_of(node)
    job.lab.power_off(lost)
    job.trains(generation=2)
    job.until(lambda: "n3" in job.records(), "a refill")
    job.until(lambda: len(job.queue()) == 2, "a job of its own for it")
    shown = job.lab.call("scontrol", "show", "job", str(job.records()["n3"].job))
    assert f"JobId={gang} " not in shown and lost in expand_hosts(shown.split("ExcNodeList=")[1].split()[0])
    assert "hf-node." not in shown, "no token is shown to others"
    job.standby_waits()
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert record.evicted == (node,)
    job.until(lambda: not job.queue(), "an empty queue")
    job.check_replay()
