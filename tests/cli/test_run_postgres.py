"""The controller's host is lost, and another host of the job carries the controller: the journal is in Postgres."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import Start
from tests.cli.driver import Job, gone
from tests.cli.test_join import host, leader_of

pytestmark = pytest.mark.e2e
TOKEN = "0b1c8e93d7a24f56b8e1902c7d3f4a65"
TAKEN_OVER_S = 15.0


@pytest.fixture
def endpoints() -> Iterator[str]:
    """Two addresses at which a controller may be; hosts are process trees of this one, so ports tell them apart."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        found = ",".join(f"127.0.0.1:{probe.getsockname()[1]}" for probe in (one, other))
    yield found


def begin(start: Start, endpoints: str, url: str, *flags: str, names: tuple[str, ...]) -> list[Job]:
    words = ("--journal", url, "--rdzv-id", f"job {endpoints}", "--set", "silence.silence_s=3", *flags)
    return [host(start, endpoints, *words, name=name, HOLDFAST_TOKEN=TOKEN) for name in names]


def processes_of(job: Job) -> list[psutil.Process]:
    front = psutil.Process(job.process.pid)
    return [front, *front.children(recursive=True)]


def test_another_host_carries_the_controller_when_its_host_is_lost(
    start: Start, endpoints: str, shared_postgres: str
) -> None:
    jobs = begin(start, endpoints, shared_postgres, "--nnodes", "2", names=("one", "two"))
    leader = leader_of(*jobs)
    [other] = [job for job in jobs if job is not leader]
    leader.trains()
    [rank] = other.run_dir.glob("logs/gen-1/rank-*/pid")
    pid, before = int(rank.read_text()), leader.status()["step"]

    struck_at = time.monotonic()
    leader.kill(leader.process.pid)  # and its controller with it; its node goes on, as its ranks do
    other.says("this host carries the controller")
    status = other.trains()
    took_s = time.monotonic() - struck_at
    assert not gone(pid), "the ranks go on"
    assert status["step"] > before
    assert "the run goes on from its journal" in other.text()
    assert took_s < TAKEN_OVER_S, f"{took_s:.1f} s"
    other.finish()
    other.ends(0)
    report = other.report()
    assert report.code == 0 and not report.incidents
    print(f"taken over after {took_s:.1f} s at a load of {os.getloadavg()[0]:.0f}")
