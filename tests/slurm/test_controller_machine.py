"""The machine of the controller loses its power, and another one takes over: machines are namespaces with networks of
their own, the database is on one more of them, and everybody finds the controller by a name in DNS."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.wire import controller_request
from tests.cli.driver import CLEAN
from tests.cli.test_run_postgres import TAKEN_OVER_S, TOKEN
from tests.postgres_server import PostgresServer
from tests.slurm.lab import LOGIN_TOO, NET
from tests.slurm.slurm_job import SlurmJob, StartSlurm, start_slurm

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
__all__ = ["start_slurm"]
NAME, PORT = "train.lab", 29400
CARRIES = "this host carries the controller"


class HostJob(SlurmJob):
    """One machine's `holdfast run`, asked by its socket alone: of its processes nothing is seen from here."""

    def status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found: dict[str, Any] = msgspec.json.decode(controller_request.fetch(self.run_dir, "/api/v1/status"))
            return found
        return {}

    def story(self) -> str:
        return "\n".join(f"--- {file}\n{file.read_text()[-2000:]}" for file in sorted(self.folder.glob("*.out")))


@pytest.fixture
def distant_postgres(start_slurm: StartSlurm) -> Iterator[PostgresServer]:
    pytest.importorskip("psycopg", reason="the extra postgres is not installed")
    server = PostgresServer(start_slurm.lab.first_process(LOGIN_TOO), f"{NET}.253")
    yield server
    server.end()


@pytest.mark.parametrize("dns", ["a name of several addresses", "a name that is moved"])
def test_another_machine_takes_over_in_time_and_ranks_train_on(
    start_slurm: StartSlurm, distant_postgres: PostgresServer, tmp_path: Path, dns: str
) -> None:
    lab = start_slurm.lab
    first, second, *training = lab.nodes[:4]
    (tmp_path / "job.py").write_text(CLEAN)
    lab.name_hosts(NAME, *((first, second) if dns == "a name of several addresses" else (first,)))

    def start(machine: str, order: int) -> HostJob:
        words = ["--rdzv-endpoint", f"{NAME}:{PORT}", "--journal", distant_postgres.url, "--rdzv-id", dns]
        words += ["--nnodes", "2", "--standbys", "2", "--node-rank", str(order), "--no-zygote"]
        words += ["--set", "probe.allow=false", "job.py", str(tmp_path)]
        env = start_slurm.env | {"HOLDFAST_TOKEN": TOKEN}
        job = HostJob(lab, tmp_path, *words, env=env, name=machine, at=machine)
        start_slurm.jobs.append(job)
        job.run_dir = Path(job.says("run directory").split("run directory ")[1])
        return job

    leader = start(first, 8)  # its node and that of its successor wait: ranks are elsewhere
    leader.says(CARRIES)
    successor, *others = [start(second, 9), *(start(machine, order) for order, machine in enumerate(training))]
    leader.trains()
    leader.until(lambda: len(leader.status().get("nodes", ())) == 4, "four nodes")

    def steps() -> list[int]:
        return [int((tmp_path / f"step-{rank}").read_text()) for rank in (0, 1)]

    before, lost_at = steps(), time.monotonic()
    lab.lose_power(first)
    if dns == "a name that is moved":
        lab.name_hosts(NAME, second)
    successor.says(CARRIES)
    successor.trains()
    took_s = time.monotonic() - lost_at
    reached = steps()

    def linked() -> set[str]:
        return {str(one["node"]) for one in successor.status()["nodes"] if one["ranks"]}

    assert min(reached) > max(before), "ranks trained on meanwhile"
    successor.until(lambda: len(linked()) == 2 and min(steps()) > max(reached), "the ranks' nodes, and more steps")
    assert successor.status()["generation"] == 1, "and are the same"
    print(f"taken over after {took_s:.1f} s, load {os.getloadavg()[0]:.0f}")
    assert took_s < TAKEN_OVER_S, f"{took_s:.1f} s"
    successor.finish()
    for job in (successor, *others):
        job.ends(0)
