"""The controller's host is lost, and another host of the job carries the controller: the journal is in Postgres."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from holdfast.cli.run_dirs import run_directory
from tests.cli.conftest import Start
from tests.cli.driver import CLEAN, Job, gone
from tests.cli.test_join import host, leader_of
from tests.postgres_server import PostgresServer
from tests.wire.given import Organisation, settings

pytestmark = pytest.mark.e2e
TOKEN = "0b1c8e93d7a24f56b8e1902c7d3f4a65"
TAKEN_OVER_S = 15.0
# Every rank writes down its longest pause between two steps.
PAUSES = CLEAN.replace("step = int(", "pause, last = 0.0, time.monotonic()\nstep = int(").replace(
    "    step += 1\n",
    """    step += 1
    pause, last = max(pause, time.monotonic() - last), time.monotonic()
    open(f"{folder}/pause-{rank}", "w").write(str(pause))
""",
)


@pytest.fixture
def endpoints() -> str:
    """Two addresses at which a controller may be; hosts are process trees of this one, so ports tell them apart."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return ",".join(f"127.0.0.1:{probe.getsockname()[1]}" for probe in (one, other))


def begin(start: Start, endpoints: str, url: str, *flags: str, names: tuple[str, ...]) -> list[Job]:
    words = ("--journal", url, "--rdzv-id", f"job {endpoints}", "--set", "silence.silence_s=3", *flags)
    return [host(start, endpoints, *words, name=name, script=PAUSES, HOLDFAST_TOKEN=TOKEN) for name in names]


def struck(job: Job) -> list[int]:
    """All processes of a host, but for its ranks' own node: what its controller needs."""
    return [job.process.pid, job.controller(), *stores_of(job)]


def stores_of(job: Job) -> list[int]:
    """The store that a controller has started; one that took a run over starts it with its first launch."""
    words = {"holdfast.client.boot.tcp_store_server", str(job.run_dir)}
    return [p.pid for p in psutil.process_iter(["cmdline"]) if words <= {*(p.info["cmdline"] or [])}]


def node_of(job: Job) -> str:
    [holder] = (job.run_dir / "nodes").glob("*/holder.pid")
    return holder.parent.name


def other_of(jobs: list[Job], one: Job) -> Job:
    [other] = [job for job in jobs if job is not one]
    return other


def test_another_host_carries_the_controller_when_its_host_is_lost(
    start: Start, endpoints: str, shared_postgres: str, tmp_path: Path
) -> None:
    jobs = begin(start, endpoints, shared_postgres, "--nnodes", "2", names=("one", "two"))
    leader = leader_of(*jobs)
    other = other_of(jobs, leader)
    leader.trains()
    [rank] = other.run_dir.glob("logs/gen-1/rank-*/pid")
    pid, before = int(rank.read_text()), leader.status()["step"]

    lost, struck_at = struck(leader), time.monotonic()
    for number in lost:  # its node goes on, so that nobody has to start again
        leader.kill(number)
    other.says("this host carries the controller")
    other.trains()
    took_s = time.monotonic() - struck_at
    other.until(lambda: other.status()["step"] > before, "more steps")
    assert not gone(pid), "the ranks go on"
    assert other.status()["generation"] == 1, "the run goes on"
    assert took_s < TAKEN_OVER_S, f"{took_s:.1f} s"
    other.finish()
    other.ends(0)
    report = other.report()
    assert report.code == 0 and not report.incidents
    pause_s = max(float(path.read_text()) for path in tmp_path.glob("pause-*"))
    assert pause_s < 6.0, "nor have they waited for a controller"
    print(f"taken over after {took_s:.1f} s, longest pause {pause_s:.1f} s, load {os.getloadavg()[0]:.0f}")


@pytest.mark.slow
def test_a_host_with_a_certificate_of_the_users_own_takes_over(
    start: Start, endpoints: str, shared_postgres: str, tmp_path: Path
) -> None:
    """The secret does not let it in, but proves the journal to it."""
    ours = Organisation(tmp_path / "ours")
    flags = ("--journal", shared_postgres, "--rdzv-id", f"job {endpoints}", "--nnodes", "2")
    jobs = [
        host(start, endpoints, *flags, *settings(ours.keys(name)), name=name, HOLDFAST_TOKEN=TOKEN)
        for name in ("one", "two")
    ]
    leader = leader_of(*jobs)
    other = other_of(jobs, leader)
    leader.trains()
    for number in struck(leader):
        leader.kill(number)
    other.says("the run goes on from its journal")
    other.trains()
    other.finish()
    other.ends(0)
    assert not other.report().incidents


@pytest.mark.slow
def test_a_machine_is_lost_with_its_controller_and_its_ranks(
    start: Start, endpoints: str, shared_postgres: str
) -> None:
    """The last of three hosts, a standby, takes the seat; it has no address at which a controller may be."""
    flags = ("--nnodes", "2", "--standbys", "1")
    jobs = begin(start, endpoints, shared_postgres, *flags, names=("one", "two", "three"))
    leader = leader_of(*jobs)
    leader.until(lambda: len(leader.status().get("nodes", ())) == 3, "three nodes")
    leader.trains()
    lost = [*struck(leader), leader.holder(node_of(leader))]
    struck_at = time.monotonic()
    for number in lost:
        leader.kill(number)
    left = [job for job in jobs if job is not leader]
    successor = left[0].until(
        lambda: next((job for job in left if "this host carries the controller" in job.text()), None), "a successor"
    )
    assert successor
    successor.until(lambda: bool(successor.status()), "its answer")
    took_s = time.monotonic() - struck_at
    successor.trains(generation=2)
    print(f"taken over after {took_s:.1f} s, trains after {time.monotonic() - struck_at:.1f} s")
    assert took_s < TAKEN_OVER_S
    successor.finish()
    for job in left:
        job.ends(0)
    [record] = successor.report().incidents
    assert record.kind == "silence"


@pytest.mark.slow
def test_a_controller_that_slept_finds_that_another_has_taken_over(
    start: Start, endpoints: str, shared_postgres: str
) -> None:
    """Its front follows from then on, and takes over again when the other one is lost in turn."""
    jobs = begin(start, endpoints, shared_postgres, "--nnodes", "2", names=("one", "two"))
    leader = leader_of(*jobs)
    other = other_of(jobs, leader)
    leader.trains()
    asleep = leader.controller()
    leader.kill(asleep, signal.SIGSTOP)
    other.says("this host carries the controller")
    other.trains()
    leader.kill(asleep, signal.SIGCONT)
    leader.says("carries the controller now; this host goes on as a node")
    assert gone(asleep)
    step = other.status()["step"]
    other.until(lambda: other.status()["step"] > step, "more steps")
    assert other.status()["generation"] == 1

    for number in struck(other):
        other.kill(number)
    leader.until(lambda: leader.text().count("this host carries the controller") == 2, "the way back")
    leader.trains()
    leader.finish()
    leader.ends(0)
    assert not leader.report().incidents


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_database_that_goes_away_under_a_job(start: Start, endpoints: str, own_postgres: PostgresServer) -> None:
    """A short absence is waited for. In a longer one the controller ends, ranks go on, and its front starts another."""
    jobs = begin(start, endpoints, own_postgres.url, "--nnodes", "2", names=("one", "two"))
    leader_of(*jobs).trains()
    pids = {int(path.read_text()) for job in jobs for path in job.run_dir.glob("logs/gen-1/rank-*/pid")}

    def step() -> int:
        return max((int(job.status().get("step", 0)) for job in jobs), default=0)

    for away_s in (0.5, 1.0, 12.0):
        before = step()
        own_postgres.kill()
        time.sleep(away_s)  # what a restart, or a failover, takes
        own_postgres.up()
        jobs[0].until(lambda: step() > before, "steps that a controller sees")  # noqa: B023
    assert len(pids) == 2 and not any(gone(pid) for pid in pids), "the ranks have gone on"
    said = "\n".join(job.text() for job in jobs)
    lost_s = run_directory.read_spec(jobs[0].run_dir).settings.node.lost_s
    assert re.search(rf" {re.escape(own_postgres.url)} .* {lost_s:g} s$", said, re.MULTILINE), "it is waited for"
    jobs[0].finish()
    for job in jobs:
        job.ends(0)
    [carrier] = [job for job in jobs if "holdfast: done: 0 incidents" in job.text()]
    assert carrier.report().generation == 1 and not carrier.report().incidents


@pytest.mark.slow
def test_a_front_that_was_killed_is_resumed_on_its_own_host(start: Start, endpoints: str, shared_postgres: str) -> None:
    [job] = begin(start, endpoints, shared_postgres, "--nnodes", "1", names=("one",))
    job.trains()
    rank, step = job.rank(0), job.status()["step"]
    job.kill(job.process.pid)
    job.start("--resume", str(job.run_dir))
    job.says("resuming")
    job.until(lambda: job.status().get("step", 0) > step, "more steps")
    assert not gone(rank) and job.status()["generation"] == 1
    job.finish()
    job.ends(0)
    assert not job.report().incidents


@pytest.mark.slow
def test_a_run_that_somebody_changed_in_the_database_is_not_taken_over(
    start: Start, endpoints: str, shared_postgres: str
) -> None:
    """Whoever can write there has another tree named as release 1, and all checksums computed again."""
    from tests.journal.test_journal_proof import Forger

    jobs = begin(start, endpoints, shared_postgres, "--nnodes", "2", names=("one", "two"))
    leader = leader_of(*jobs)
    other = other_of(jobs, leader)
    leader.trains()
    [rank] = other.run_dir.glob("logs/gen-1/rank-*/pid")
    for number in struck(leader):
        leader.kill(number)
    forger = Forger(shared_postgres, f"job {endpoints}")
    forger.rewrite_history()
    forger.link.close()
    other.says("is not as its controllers have left it: somebody has changed it, and who is not known")
    other.ends(2)
    assert not (other.run_dir / "controller.log").exists(), "no controller was started here"
    assert not gone(int(rank.read_text())), "the ranks go on"
    for job in jobs:
        job.kill(job.holder(node_of(job)))
