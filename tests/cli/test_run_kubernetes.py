"""Jobs whose nodes are pods: `holdfast run --fleet kubernetes`, with machines that the test plays."""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.wire import program_fork_server
from tests.cli.conftest import Start
from tests.cli.driver import Job, gone
from tests.cli.test_run_postgres import other_of, struck
from tests.conftest import job_environment
from tests.kube.cluster import FakeCluster

pytestmark = pytest.mark.e2e

FLAGS = ("--fleet", "kubernetes", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "GPT 4", "--kube-image", "lab:1")


@pytest.fixture
def cluster(tmp_path: Path, no_orphans: str, warm_server: Path) -> Iterator[FakeCluster]:
    """Its machines have torch imported already."""
    cluster = FakeCluster(tmp_path / "cluster")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cluster.machines.env = job_environment() | {"PATH": path, program_fork_server.NAMED: str(warm_server)}
    yield cluster
    cluster.close()


def pods(cluster: FakeCluster) -> dict[str, str]:
    """The pods there are, and their machines."""
    held = cluster.fake.objects.held
    return {name: pod["spec"].get("nodeName", "") for (kind, name), pod in held.items() if kind == "pods"}


def run(start: Start, cluster: FakeCluster, *flags: str, name: str = "job", **env: str) -> Job:
    where = {"KUBECONFIG": str(cluster.kubeconfig)}
    return start(*FLAGS, "--kube-namespace", cluster.namespace, *flags, name=name, **where, **env)


def ranks_of(cluster: FakeCluster) -> list[int]:
    """The pids of ranks in all pods."""
    return [int(path.read_text()) for path in cluster.machines.folder.rglob("logs/gen-1/rank-*/pid")]


def test_a_pod_that_dies_is_replaced_by_a_standby_and_another_is_asked_for(start: Start, cluster: FakeCluster) -> None:
    job = run(start, cluster, "--nnodes", "2", "--standbys", "1")
    seated = [one["node"] for one in job.trains(1)["nodes"] if one["role"] == "active"]
    secrets = [found for (kind, _), found in cluster.fake.objects.held.items() if kind == "secrets"]
    assert len(secrets) == 3 and all(one["metadata"]["ownerReferences"][0]["name"] == "gpt-4" for one in secrets)
    for pod in (found for (kind, _), found in cluster.fake.objects.held.items() if kind == "pods"):
        assert "hf-node" not in json.dumps(pod), "a token is in nobody's manifest"
    lost = pods(cluster)[f"gpt-4-{seated[1]}"]
    cluster.machines.kill(seated[1])
    job.trains(2)
    job.until(lambda: pods(cluster).get("gpt-4-n3"), "a pod in place of the lost one")
    job.until(lambda: f"gpt-4-{seated[1]}" not in pods(cluster), "the lost pod to be removed")
    assert pods(cluster)["gpt-4-n3"] != lost, "the machine of an evicted node is avoided"
    job.finish()
    job.ends(0)
    left = [key for key in cluster.fake.objects.held if key[0] != "nodes"]
    assert not left, "nothing of the run stays in the cluster"
    job.check_replay()


@pytest.mark.slow
def test_a_pod_that_will_be_deleted_hands_its_seat_over_before_its_end(start: Start, cluster: FakeCluster) -> None:
    flags = ("--set", "recovery.leave_s=30", "--set", "recovery.shutdown_grace_s=10")
    job = run(start, cluster, "--nnodes", "2", "--standbys", "1", *flags)
    seated = [one["node"] for one in job.trains(1)["nodes"] if one["role"] == "active"]
    cluster.fake.objects.delete("pods", f"gpt-4-{seated[1]}", None)  # as a scheduler does that wants the machine
    after = [one["node"] for one in job.trains(2)["nodes"] if one["role"] in ("active", "admitting")]
    assert seated[1] not in after and seated[0] in after
    assert not job.report().incidents, "nothing has failed"
    job.finish()
    job.ends(0)


@pytest.mark.slow
def test_another_controller_carries_the_run_on_and_knows_its_pods(
    start: Start, cluster: FakeCluster, shared_postgres: str
) -> None:
    """As two replicas of a controller do that share nothing but the database: one carries the run, the other waits."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    words = ("--rdzv-endpoint", endpoint, "--journal", shared_postgres, "--rdzv-id", endpoint, "--nnodes", "2")
    env = {"HOLDFAST_TOKEN": "0b1c8e93d7a24f56b8e1902c7d3f4a65"}
    jobs = [run(start, cluster, *words, "--standbys", "1", name=name, **env) for name in ("one", "two")]
    for job in jobs:
        job.patience_s = 60.0
    waiting = jobs[0].until(lambda: next((job for job in jobs if "waiting to take" in job.text()), None), "one to wait")
    assert waiting
    leader = other_of(jobs, waiting)
    leader.run_dir = Path(leader.says("run directory").split("run directory ")[1])
    seated = [one["node"] for one in leader.trains(1)["nodes"] if one["role"] == "active"]
    had, pids = pods(cluster), ranks_of(cluster)
    assert len(pids) == 2
    struck_at = time.monotonic()
    for pid in struck(leader):
        leader.kill(pid)
    waiting.run_dir = Path(waiting.says("run directory").split("run directory ")[1])
    waiting.says("the run goes on from its journal")
    waiting.trains(1)
    print(f"taken over after {time.monotonic() - struck_at:.1f} s at a load of {os.getloadavg()[0]:.0f}")
    assert pods(cluster) == had and not any(map(gone, pids)), "pods and ranks are the same"
    cluster.machines.kill(seated[1])
    waiting.trains(2)
    waiting.until(lambda: [pod for pod in pods(cluster) if pod not in had], "a pod in place of the lost one")
    waiting.finish()
    waiting.ends(0)
    assert not [key for key in cluster.fake.objects.held if key[0] != "nodes"], "nothing of the run stays"
