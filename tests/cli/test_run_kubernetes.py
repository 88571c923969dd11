"""Jobs whose nodes are pods: `holdfast run --fleet kubernetes`, with machines that the test plays."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.cli.launch.journal_and_notes import NotesFolder
from holdfast.fleet.kubernetes_client import KubernetesClient
from holdfast.fleet.kubernetes_fleet import FleetWishes, KubernetesFleet
from holdfast.fleet.kubernetes_lease import LASTS_S, KubernetesLease
from holdfast.fleet.pod_manifest import EPOCH_NOTE, PodShape
from holdfast.journal.lease_term import no_lease
from holdfast.model.fleet_node_reports import FleetReport, FleetState
from holdfast.wire import program_fork_server, run_and_node_specs
from tests.cli.conftest import Start
from tests.cli.driver import Job, gone
from tests.cli.test_run_postgres import other_of, struck
from tests.conftest import job_environment
from tests.kube.cluster import Cluster, FakeCluster

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
    job = start(*FLAGS, "--kube-namespace", cluster.namespace, *flags, name=name, **where, **env)
    job.watched = cluster.machines.folder
    return job


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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_train_on_while_the_api_server_is_away_for_longer_than_a_lease(
    start: Start, cluster: FakeCluster
) -> None:
    """The controller ends, as the API server might answer others; the next one there waits, and knows its pods."""
    job = run(start, cluster, "--nnodes", "2", "--standbys", "1")
    seated = [one["node"] for one in job.trains(1)["nodes"] if one["role"] == "active"]
    had, pids, first = pods(cluster), ranks_of(cluster), job.controller()
    cluster.fake.go_away()
    job.until(lambda: gone(first), "the end of the first controller", 2 * LASTS_S)
    job.says("the lease of gpt-4 cannot be taken yet: the Kubernetes API server cannot be asked", LASTS_S)
    before = [size_of_steps(job, rank) for rank in (0, 1)]
    job.until(lambda: all(size_of_steps(job, rank) > before[rank] for rank in (0, 1)), "steps without a controller")
    cluster.fake.come_back()
    job.until(lambda: job.status().get("generation") == 1, "the next controller", LASTS_S)
    assert pods(cluster) == had and len(pids) == 2 and not any(map(gone, pids)), "pods and ranks are the same"
    cluster.machines.kill(seated[1])
    job.trains(2)
    job.until(lambda: [pod for pod in pods(cluster) if pod not in had], "a pod in place of the lost one")
    job.finish()
    job.ends(0)
    job.check_replay()


def size_of_steps(job: Job, rank: int) -> int:
    """The newest step of a rank, as its script writes it down."""
    return int((job.folder / f"step-{rank}").read_text())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_why_a_replacement_does_not_start_is_told_and_another_is_asked_for(start: Start, cluster: FakeCluster) -> None:
    job = run(start, cluster, "--nnodes", "2", "--standbys", "1", "--set", "recovery.ready_s=30")
    job.patience_s = 60.0
    seated = [one["node"] for one in job.trains(1)["nodes"] if one["role"] == "active"]
    cluster.machines.imageless = {*cluster.machines.names} - {*pods(cluster).values()}
    cluster.machines.kill(seated[1])
    job.trains(2)
    line = job.says(" does not start: ImagePullBackOff: Back-off pulling image")
    [node] = re.findall(r"(n\d+) does not start", line)
    assert pods(cluster)[f"gpt-4-{node}"] in cluster.machines.imageless
    job.says(f"{node} given back, as not ready within ")
    cluster.machines.imageless.clear()

    def standbys() -> list[str]:
        return [one["node"] for one in job.status().get("nodes", ()) if one["role"] == "ready"]

    job.until(standbys, "another in its place")
    assert node not in standbys() and job.status()["generation"] == 2
    job.until(lambda: f"gpt-4-{node}" not in pods(cluster), "the first replacement to be removed")
    job.finish()
    job.ends(0)
    job.check_replay()


def second_holder(cluster: FakeCluster, run_dir: Path, folder: Path) -> KubernetesFleet:
    """The fleet of a second controller of the run, with the records that there were when the first one fell asleep."""
    folder.mkdir()
    shutil.copy(run_dir / "pods.json", folder)
    shape = run_and_node_specs.read_json(run_dir / "pod_shape.json", PodShape)
    client = KubernetesClient(cluster.config, cluster.namespace, lambda: 2)
    wishes = FleetWishes(command=lambda node: ("sleep", "1000"), files=lambda node: {}, least=1, gather_s=0, avoid_s=0)
    return KubernetesFleet(NotesFolder(folder), shape, wishes, client, lambda: 2)


def check_silent_machine(job: Job, cluster: Cluster, silence: Callable[[str], None]) -> None:
    """Lose a machine of a job of two pods and a standby: its kubelet falls silent, and then what runs there does. What
    Kubernetes has said of the machine stands in the incident."""
    seated = [one["node"] for one in job.trains(1)["nodes"] if one["role"] == "active"]
    process = cluster.machines.process_of(seated[1])
    machine = (cluster.machines.pod_of(seated[1]) or {})["spec"]["nodeName"]
    silence(machine)

    def is_told() -> bool:
        told = [one.state for report in job.events(FleetReport) for one in report.nodes.values()]
        return FleetState.UNKNOWN in told

    job.until(is_told, "a report that the machine is not ready")
    assert process is not None
    stopped = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    job.trains(2)
    [record] = job.report().incidents
    assert record.suspects == (seated[1],) == record.evicted and f" {machine} " in record.cause
    cluster.machines.wake(machine)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    job.until(lambda: cluster.machines.process_of(seated[1]) is None, "the end of what ran there")


@pytest.mark.slow
def test_what_kubernetes_says_of_a_machine_is_told_with_the_silence_of_its_node(
    start: Start, cluster: FakeCluster
) -> None:
    job = run(start, cluster, "--nnodes", "2", "--standbys", "1")
    check_silent_machine(job, cluster, cluster.machines.silence)
    job.finish()
    job.ends(0)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_controller_that_slept_deletes_nothing_of_its_successor_ends_and_waits_in_turn(
    start: Start, cluster: FakeCluster, tmp_path: Path
) -> None:
    job = run(start, cluster, "--nnodes", "2")
    await asyncio.to_thread(job.trains, 1)
    asleep, before = job.controller(), {*pods(cluster)}
    for pid in (job.process.pid, asleep):
        job.kill(pid, signal.SIGSTOP)
    said: list[str] = []
    client = KubernetesClient(cluster.config, cluster.namespace, no_lease)
    lease = KubernetesLease(client, "gpt-4", "another", tmp_path / "lease", said.append)
    taking_at = time.monotonic()
    await lease.take()
    assert time.monotonic() - taking_at > LASTS_S - 10 and len(said) == 1, "not before the first one's is over"
    keeping = asyncio.create_task(lease.keep())
    fleet = second_holder(cluster, job.run_dir, tmp_path / "second")
    [new] = await fleet.acquire(1)
    await fleet.survey()
    for pid in (asleep, job.process.pid):
        job.kill(pid, signal.SIGCONT)
    await asyncio.to_thread(job.until, lambda: gone(asleep), "the end of the one that slept")
    await asyncio.to_thread(job.says, "the lease of gpt-4 is held by another; waiting", 60.0)
    await asyncio.sleep(3.0)  # a survey would have come
    left = {name: pod["metadata"] for (kind, name), pod in cluster.fake.objects.held.items() if kind == "pods"}
    assert left.keys() == {*before, f"gpt-4-{new}"}
    assert not any("deletionTimestamp" in meta for meta in left.values())
    await fleet.give_back(new, "not needed")
    await fleet.close()
    keeping.cancel()
    await lease.let_go()
    await asyncio.to_thread(job.trains, 1)
    job.finish()
    await asyncio.to_thread(job.ends, 0)


def lasting(job: Job, begun_at: float) -> float:
    """Seconds from then to the end of the front, which ends by Ctrl-C."""
    job.ends(130)
    return time.monotonic() - begun_at


def test_ctrl_c_ends_a_second_run_of_the_name_that_waits_for_the_lease(start: Start, cluster: FakeCluster) -> None:
    first = run(start, cluster, "--nnodes", "2")
    before = first.trains(1)["step"]
    second = run(start, cluster, "--nnodes", "2", "--run-dir", str(first.folder / "again"), name="second")
    second.run_dir = first.folder / "again"
    second.says("waiting until it is free")
    assert named(second.run_dir)
    had, begun_at = pods(cluster), time.monotonic()
    second.interrupt()
    assert lasting(second, begun_at) < 5.0, "one is enough, and at once"
    ended = run_and_node_specs.read_json(second.run_dir / "exit.json", run_and_node_specs.RunEnd)
    assert ended.code == 130 and len(second.sentences()) > 2, "and a sentence about it"
    assert not named(second.run_dir) and pods(cluster) == had
    left = {path.name for path in second.run_dir.iterdir()}
    assert not left & {"token", "env.json", "door", "controller.json", "waiting.json"}
    first.until(lambda: first.status().get("step", -1) > before, "more steps of the first one")
    first.finish()
    first.ends(0)


def named(run_dir: Path) -> int | None:
    """The controller of this run directory, listening or not."""
    words = {"holdfast.cli.launch.controller_main", str(run_dir)}
    return next((p.pid for p in psutil.process_iter(["cmdline"]) if words <= {*(p.info["cmdline"] or [])}), None)


@pytest.mark.slow
def test_ctrl_c_ends_a_resume_that_waits_and_leaves_the_run_as_it_was(start: Start, cluster: FakeCluster) -> None:
    job = run(start, cluster, "--nnodes", "2")
    step, had, pids = job.trains(1)["step"], pods(cluster), ranks_of(cluster)
    for pid in struck(job):
        job.kill(pid)
    job.process.wait()
    lease = cluster.fake.objects.held["leases", "gpt-4"]["spec"]
    own, lease["holderIdentity"] = lease["holderIdentity"], "elsewhere.another"
    job.start("--resume", str(job.run_dir))
    job.says("waiting until it is free")
    begun_at = time.monotonic()
    job.interrupt()
    assert lasting(job, begun_at) < 5.0
    assert "--resume" in job.sentences()[-1] and not named(job.run_dir)
    assert pods(cluster) == had and not any(map(gone, pids)), "they are another controller's"
    assert {"token", "env.json", "door"} <= {path.name for path in job.run_dir.iterdir()}
    lease["holderIdentity"] = own
    job.start("--resume", str(job.run_dir))
    job.until(lambda: job.status().get("step", -1) > step, "more steps")
    assert job.status()["generation"] == 1, "ranks go on"
    job.finish()
    job.ends(0)
    job.check_replay()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="a machine with a name of its own needs root")
def test_the_controller_moves_to_another_machine_with_the_volume_of_its_journal(
    start: Start, cluster: FakeCluster
) -> None:
    """As when a Deployment makes its pod anew elsewhere, with the same volume."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    job = run(start, cluster, "--rdzv-endpoint", endpoint, "--nnodes", "2", "--standbys", "1")
    seated = [one["node"] for one in job.trains(1)["nodes"] if one["role"] == "active"]
    had, pids, step = pods(cluster), ranks_of(cluster), job.status()["step"]
    for pid in struck(job):
        job.kill(pid)
    job.process.wait()
    resume = (sys.executable, "-m", "holdfast.cli", "run", "--resume", str(job.run_dir))
    elsewhere = ("unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh", *resume)
    own = {key: value for key, value in job._env.items() if key != program_fork_server.NAMED}  # that one is here
    with job.output.open("ab") as output:
        job.process = subprocess.Popen(
            elsewhere, cwd=job.folder, env=own, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    job.patience_s = 2 * LASTS_S
    job.says("waiting until it is free")
    job.until(lambda: job.status().get("step", -1) > step, "more steps")
    assert job.status()["generation"] == 1 and pods(cluster) == had and not any(map(gone, pids)), "ranks go on"
    lease = cluster.fake.objects.held["leases", "gpt-4"]["spec"]
    assert lease["holderIdentity"].startswith("elsewhere.") and lease["leaseTransitions"] == 2
    cluster.machines.kill(seated[1])
    job.trains(2)
    name = job.until(lambda: next((pod for pod in pods(cluster) if pod not in had), ""), "a pod for the lost one")
    made = cluster.fake.objects.held["pods", name]["metadata"]["annotations"]
    assert made[EPOCH_NOTE] == "2", "by the second controller"
    job.finish()
    job.ends(0)
    job.check_replay()
