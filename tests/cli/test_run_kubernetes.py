"""Jobs whose nodes are pods: `holdfast run --fleet kubernetes`, with machines that the test plays."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.conftest import job_environment
from tests.kube.cluster import FakeCluster

pytestmark = pytest.mark.e2e

FLAGS = ("--fleet", "kubernetes", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "GPT 4", "--kube-image", "lab:1")


@pytest.fixture
def cluster(tmp_path: Path, no_orphans: str) -> Iterator[FakeCluster]:
    cluster = FakeCluster(tmp_path / "cluster")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cluster.machines.env = job_environment() | {"PATH": path}
    yield cluster
    cluster.close()


def pods(cluster: FakeCluster) -> dict[str, str]:
    """The pods there are, and their machines."""
    held = cluster.fake.objects.held
    return {name: pod["spec"].get("nodeName", "") for (kind, name), pod in held.items() if kind == "pods"}


def run(start: Start, cluster: FakeCluster, *flags: str) -> Job:
    return start(*FLAGS, "--kube-namespace", cluster.namespace, *flags, KUBECONFIG=str(cluster.kubeconfig))


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
