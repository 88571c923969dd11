"""The fleet of pods on a real API server, and on Kubernetes' own controllers and scheduler; kubelets are played."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from holdfast.fleet import kubernetes_fleet, pod_table
from holdfast.fleet.kubernetes_client import GONE as TOO_OLD
from holdfast.fleet.kubernetes_client import KubernetesClient, KubernetesError
from holdfast.fleet.kubernetes_fleet import KubernetesFleet
from holdfast.fleet.pod_table import PodChanges, PodTable
from holdfast.journal.lease_term import no_lease
from holdfast.model.action import Dismissal
from holdfast.model.fleet_node_reports import FleetNode, FleetState
from tests.cli.conftest import Start
from tests.cli.conftest import start as start
from tests.cli.driver import ROOT
from tests.cli.test_run_kubernetes import check_silent_machine
from tests.conftest import job_environment
from tests.kube import places
from tests.kube.cluster import BINARIES, ControlPlane, RealCluster, write_kubeconfig
from tests.kube.test_deployment import needs_helm, render

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

UP, GONE, QUEUED, UNKNOWN = FleetState.UP, FleetState.GONE, FleetState.QUEUED, FleetState.UNKNOWN
PATIENCE_S = 60.0


@pytest.fixture
def cluster(plane: ControlPlane, tmp_path: Path, no_orphans: str) -> Iterator[RealCluster]:
    cluster = RealCluster(tmp_path / "cluster", plane)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cluster.machines.env = job_environment() | {"PATH": path}
    yield cluster
    cluster.close()


@pytest.fixture
async def fleet(cluster: RealCluster, tmp_path: Path) -> AsyncIterator[KubernetesFleet]:
    fleet = places.open_fleet(tmp_path, cluster)
    yield fleet
    for node in fleet.nodes():
        with contextlib.suppress(OSError):
            await fleet.give_back(node, "the test is over")
    await places.close(tmp_path)


async def until_seen(fleet: KubernetesFleet, fits: Callable[[dict[str, FleetNode]], bool]) -> dict[str, FleetNode]:
    until_at = time.monotonic() + PATIENCE_S
    while not fits(seen := await fleet.survey()):
        assert time.monotonic() < until_at, seen
        await asyncio.sleep(0.1)
    return seen


def are(state: FleetState, *nodes: str) -> Callable[[dict[str, FleetNode]], bool]:
    return lambda seen: all(seen[node].state is state for node in nodes)


async def test_pods_are_made_watched_and_deleted(fleet: KubernetesFleet, cluster: RealCluster) -> None:
    cluster.machines.held = True
    kept, lost = await fleet.acquire(2)
    assert are(QUEUED, kept, lost)(await fleet.survey())
    cluster.machines.held = False
    seen = await until_seen(fleet, are(UP, kept, lost))
    assert seen[kept].near == ("z1", "r7") and seen[kept].host.startswith("gpu-")
    cluster.machines.kill(lost)
    assert "code 137" in (await until_seen(fleet, are(GONE, lost)))[lost].reason
    bad = seen[lost].host
    await fleet.give_back(lost, "evicted", Dismissal.EVICTED)
    assert cluster.machines.pod_of(lost) is None and fleet.nodes() == (kept,)
    taints = cluster.api.ask("GET", f"/api/v1/nodes/{bad}")["spec"]["taints"]
    assert any(one["key"] == "holdfast.dev/evicted" for one in taints)
    [new] = await fleet.acquire(1)
    assert (await until_seen(fleet, are(UP, new)))[new].host != bad


async def test_a_crash_of_the_api_server_and_a_compaction_are_ridden_out(
    fleet: KubernetesFleet, cluster: RealCluster, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_fleet, "_BEYOND_S", 10 * PATIENCE_S)  # for an API server to start on a busy machine
    first, second = await fleet.acquire(2)
    await until_seen(fleet, are(UP, first, second))
    await asyncio.to_thread(plane.crash_api)
    with pytest.raises(KubernetesError) as refused:
        await fleet.survey()
    assert refused.value.status == 0, "nobody answered"
    ending = asyncio.create_task(fleet.give_back(first, "drain by me"))
    await asyncio.to_thread(plane.start_api)
    await ending
    assert are(UP, second)(await fleet.survey()) and cluster.machines.process_of(first) is None
    await asyncio.to_thread(plane.compact)
    await asyncio.to_thread(plane.crash_api)
    await asyncio.to_thread(plane.start_api)
    cluster.machines.kill(second)
    await until_seen(fleet, are(GONE, second))


class Recorder:
    """Asks as a client does, and notes with which status watches were refused."""

    def __init__(self, client: KubernetesClient) -> None:
        self.list_pods, self._client = client.list_pods, client
        self.refused: list[int] = []

    async def watch_pods(self, run: str, version: str) -> PodChanges:
        try:
            async for change in self._client.watch_pods(run, version):
                yield change
        except KubernetesError as e:
            self.refused.append(e.status)
            raise


async def test_a_watch_from_before_a_compaction_is_refused_and_a_table_of_pods_lists_them_again(
    fleet: KubernetesFleet, cluster: RealCluster, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_table, "_CATCH_UP_S", PATIENCE_S)  # for a refusal to arrive on a busy machine
    kept, lost = await fleet.acquire(2)
    await until_seen(fleet, are(UP, kept, lost))
    client = KubernetesClient(cluster.config, cluster.namespace, lambda: None)
    recorder = Recorder(client)
    table = PodTable(recorder, "lab")
    await table.refresh()
    _, old = await client.list_pods("lab")
    await asyncio.to_thread(plane.crash_api)
    await asyncio.to_thread(plane.start_api)
    await fleet.give_back(lost, "while the table's watch is broken")
    await asyncio.to_thread(plane.compact)
    await asyncio.to_thread(plane.crash_api)
    await asyncio.to_thread(plane.start_api)
    with pytest.raises(KubernetesError) as refused:
        await anext(client.watch_pods("lab", old))
    assert refused.value.status == TOO_OLD
    await table.refresh()
    assert TOO_OLD in recorder.refused, recorder.refused
    assert (set(table.pods), set(table.removed)) == ({kept}, {lost})
    cluster.machines.kill(kept)
    until_at = time.monotonic() + PATIENCE_S
    while table.pods[kept].status.phase != "Failed":  # a watch from after the new list tells it
        assert time.monotonic() < until_at
        await table.refresh()
    await table.close()
    await client.close()


async def test_kubernetes_itself_finds_a_machine_that_does_not_answer_and_collects_what_a_run_leaves(
    fleet: KubernetesFleet, cluster: RealCluster, plane: ControlPlane
) -> None:
    await asyncio.to_thread(plane.start_controllers)
    near, far = await fleet.acquire(2)
    seen = await until_seen(fleet, are(UP, near, far))
    where = seen[far].host
    cluster.machines.silent.add(where)  # its heart stops; the node controller does the rest
    seen = await until_seen(fleet, are(UNKNOWN, far))
    assert f" {where} " in seen[far].reason and seen[near].state is UP
    with pytest.raises(OSError, match=f" {where} "):
        await fleet.give_back(far, "evicted")
    assert cluster.machines.process_of(far) is not None
    cluster.machines.silent.clear()
    client = KubernetesClient(cluster.config, cluster.namespace, no_lease)
    assert await client.delete_lease("lab")
    await client.close()
    until_at = time.monotonic() + PATIENCE_S
    while cluster.machines.pod_of(near) or cluster.machines.pod_of(far):
        assert time.monotonic() < until_at, "what the lease owned has to go with it"
        await asyncio.sleep(0.2)


def kubectl(cluster: RealCluster, *words: str, text: str = "", code: int = 0) -> str:
    """Debian's kubectl, in the test's own namespace; what it prints, or says where it fails."""
    argv = [str(BINARIES / "kubectl"), f"--kubeconfig={cluster.kubeconfig}", f"--namespace={cluster.namespace}", *words]
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def custom_kind(group: str, version: str, kind: str) -> str:
    """A definition of a custom resource that takes anything: its own is not ours to ship."""
    plural = f"{kind.lower()}s"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    content = {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group, "scope": "Namespaced", "names": {"kind": kind, "plural": plural},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }  # fmt: skip
    return json.dumps(content)


def test_a_cluster_takes_all_that_we_ship(cluster: RealCluster) -> None:
    for kind in (
        ("monitoring.coreos.com", "v1", "ServiceMonitor"),
        ("jobset.x-k8s.io", "v1alpha2", "JobSet"),
        ("trainer.kubeflow.org", "v1alpha1", "TrainJob"),
    ):
        kubectl(cluster, "apply", "-f", "-", text=custom_kind(*kind))
        kubectl(cluster, "wait", "--for=condition=Established", f"crd/{kind[2].lower()}s.{kind[0]}")
    for overlay in ("machines", "taints", "monitoring", "kueue", "postgres"):
        said = kubectl(cluster, "apply", "-k", str(ROOT / "deploy/kubernetes/overlays" / overlay))
        assert "deployment.apps/holdfast" in said and "lease.coordination.k8s.io/holdfast-run" in said
    for example in sorted((ROOT / "deploy/kubernetes/examples").glob("*.yaml")):
        # Indexed Jobs are newer than this API server: their fields are held against newer schemas elsewhere.
        lax = ("--validate=false",) if example.name == "job_with_kueue.yaml" else ()
        assert "train created" in kubectl(cluster, "apply", *lax, "-f", str(example)).replace("configured", "created")


@needs_helm
def test_a_namespace_has_several_releases_of_the_chart(cluster: RealCluster, tmp_path: Path) -> None:
    for release in ("gpt", "bert"):
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": [*render(tmp_path, release).values()]})
        said = kubectl(cluster, "apply", "-f", "-", text=text).splitlines()
        assert all(line.endswith(" created") for line in said) and f"deployment.apps/{release} created" in said


def run_as_controller(cluster: RealCluster, plane: ControlPlane, folder: Path) -> Path:
    """The kubeconfig of somebody who may do what our role lets a controller do, and look at machines, and no more."""
    kubectl(cluster, "apply", "-f", str(ROOT / "deploy/kubernetes/base/controller/access.yaml"))
    who = f"--user=controller-of-{cluster.namespace}"
    kubectl(cluster, "create", "rolebinding", "lab", "--role=holdfast", who)
    kubectl(cluster, "create", "clusterrole", f"look-{cluster.namespace}", "--verb=get", "--resource=nodes")
    looks = f"look-{cluster.namespace}"
    kubectl(cluster, "create", "clusterrolebinding", looks, f"--clusterrole={looks}", who)
    token = plane.add_user(f"controller-of-{cluster.namespace}")
    return write_kubeconfig(folder, plane.url, token, plane.authority)


def test_a_job_survives_the_loss_of_a_pod_of_its_controller_and_of_the_api_server_with_the_rights_of_our_role(
    start: Start, cluster: RealCluster, plane: ControlPlane, tmp_path: Path
) -> None:
    own = run_as_controller(cluster, plane, tmp_path / "own")
    flags = ("--fleet", "kubernetes", "--kube-image", "lab:1", "--kube-namespace", cluster.namespace)
    job = start(
        *flags, "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "gpt", "--nnodes", "2", "--standbys", "1",
        KUBECONFIG=str(own),
    )  # fmt: skip
    job.patience_s, job.watched = PATIENCE_S, cluster.machines.folder
    seated = [one["node"] for one in job.trains(1)["nodes"] if one["role"] == "active"]
    plane.crash_api()
    job.kill(job.controller())
    cluster.machines.kill(seated[1])
    job.trains(2)
    plane.start_api()
    job.until(lambda: cluster.machines.pod_of(seated[1]) is None, "the lost pod to be removed")
    waits = lambda: [one["node"] for one in job.status().get("nodes", ()) if one["role"] == "ready"]  # noqa: E731
    job.until(waits, "a standby in place of the one that was admitted")
    job.finish()
    job.ends(0)
    for path in ("/api/v1", "pods"), ("/api/v1", "secrets"), ("/apis/coordination.k8s.io/v1", "leases"):
        left = cluster.api.ask("GET", f"{path[0]}/namespaces/{cluster.namespace}/{path[1]}")["items"]
        assert not left, f"nothing of the run stays in the cluster: {job.story()}"
    job.check_replay()


def test_what_the_node_controller_says_of_a_machine_is_told_with_the_silence_of_its_node(
    start: Start, cluster: RealCluster, plane: ControlPlane
) -> None:
    plane.start_controllers()
    flags = ("--fleet", "kubernetes", "--kube-image", "lab:1", "--kube-namespace", cluster.namespace)
    words = ("--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "gpt", "--nnodes", "2", "--standbys", "1")
    job = start(*flags, *words, KUBECONFIG=str(cluster.kubeconfig))
    job.patience_s, job.watched = PATIENCE_S, cluster.machines.folder
    check_silent_machine(job, cluster, cluster.machines.silent.add)
    job.finish()
    job.ends(0)


def test_a_machine_that_is_drained_gives_its_seat_to_a_standby(start: Start, cluster: RealCluster) -> None:
    """By the words of docs/KUBERNETES.md; kubectl asks the API server to evict the pod."""
    words = ("--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "gpt", "--nnodes", "2", "--standbys", "1")
    flags = ("--fleet", "kubernetes", "--kube-image", "lab:1", "--kube-namespace", cluster.namespace)
    limits = ("--set", "recovery.leave_s=30", "--set", "recovery.shutdown_grace_s=10")
    job = start(*flags, *words, *limits, KUBECONFIG=str(cluster.kubeconfig))
    job.patience_s, job.watched = PATIENCE_S, cluster.machines.folder
    seated = [one["node"] for one in job.trains(1)["nodes"] if one["role"] == "active"]
    job.until(lambda: any(one["role"] == "ready" for one in job.status()["nodes"]), "a standby")
    machine = (cluster.machines.pod_of(seated[1]) or {})["spec"]["nodeName"]
    for given, lacking in ((), "--delete-emptydir-data"), (("--delete-emptydir-data",), "--force"):
        assert lacking in kubectl(cluster, "drain", machine, "--ignore-daemonsets", *given, code=1)
    assert cluster.machines.process_of(seated[1]) is not None
    drain = ("drain", machine, "--ignore-daemonsets", "--force", "--delete-emptydir-data", "--timeout=120s")
    assert f"pod/gpt-{seated[1]} evicted" in kubectl(cluster, *drain)
    after = [one["node"] for one in job.trains(2)["nodes"] if one["role"] in ("active", "admitting")]
    assert seated[1] not in after and seated[0] in after
    new = job.until(lambda: (cluster.machines.pod_of("n3") or {"spec": {}})["spec"].get("nodeName"), "a pod elsewhere")
    assert new != machine
    assert not job.report().incidents, "nothing has failed"
    job.finish()
    job.ends(0)
    job.check_replay()
