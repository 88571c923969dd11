"""On a real Slurm with a topology.conf: a job knows the switches above its nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.driver import until
from tests.slurm.lab import SlurmLab
from tests.slurm.slurm_job import StartSlurm, jobs_in_own_lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_orphans: str) -> Iterator[StartSlurm]:
    with jobs_in_own_lab(tmp_path, monkeypatch, SlurmLab(4, switches=("leaf-a", "leaf-b"))) as start:
        yield start


def test_seats_carry_the_switches_above_their_hosts(start: StartSlurm) -> None:
    job = start("--nnodes", "3")
    job.trains()
    leaves = {host: "leaf-a" if n < 2 else "leaf-b" for n, host in enumerate(job.lab.nodes)}
    seats = {job.node_of_rank(rank) for rank in range(3)}
    until(lambda: all(job.records()[node].near for node in seats), "the places of all nodes", 60)
    found = {job.records()[node].host: job.records()[node].near for node in seats}
    assert found == {host: ("core", leaves[host]) for host in found} and len(found) == 3
    assert {near for _, near in found.values()} == {"leaf-a", "leaf-b"}, "three hosts, of which two are at one switch"
    job.finish()
    job.ends(0)
