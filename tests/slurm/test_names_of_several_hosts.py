"""On machines with addresses of their own: a name that stands for two of them, as the endpoint of a job without a
database. Slurm has no part in it."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.wire.rank_environment_defaults import make_rank_environment
from tests.conftest import job_environment
from tests.slurm.lab import SlurmLab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
TOKEN = "5d1a70c4b2e94f3896ab07ce31f85d24"


def test_no_two_machines_lead_one_job(slurm_lab: SlurmLab, tmp_path: Path, no_orphans: str) -> None:
    one, other, third = slurm_lab.nodes[:3]
    slurm_lab.name_hosts("ctl", one, other)
    (tmp_path / "job.py").touch()
    env = (
        make_rank_environment(job_environment())
        | slurm_lab.env
        | {"HOLDFAST_TOKEN": "5d1a70c4b2e94f3896ab07ce31f85d24"}
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"ctl:{probe.getsockname()[1]}"
    words = (sys.executable, "-m", "holdfast.cli", "run", "--rdzv-endpoint", endpoint, "--nnodes", "3", "--rdzv-conf")
    jobs = {}
    for node in (one, other, third):
        told = slurm_lab.words(*words, "join_timeout=8", "job.py", on=node, cwd=str(tmp_path))
        own = env | {"HOLDFAST_HOME": str(tmp_path / node)}
        jobs[node] = subprocess.Popen(told, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = {node: job.communicate(timeout=120)[0] for node, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.kill()
            job.wait()
        slurm_lab.name_hosts("ctl")
    assert {job.returncode for job in jobs.values()} == {2}, said
    for node in (one, other):
        [line] = said[node].splitlines()
        assert line.startswith("holdfast run: ctl stands for 10.77.0."), line
    assert "no answer" in said[third], "nor does a machine find one that it may follow"
