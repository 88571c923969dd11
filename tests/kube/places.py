"""A fleet of pods at a place, for the contract that all fleets keep."""

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cli.launch.journal_and_notes import NotesFolder
from holdfast.fleet.kubernetes_client import KubernetesClient
from holdfast.fleet.kubernetes_fleet import FleetWishes, KubernetesFleet
from holdfast.fleet.pod_manifest import Manifest, PodShape
from holdfast.fleet.pod_reading import PodView
from tests.fleet.places import Cut
from tests.kube.cluster import Cluster, FakeCluster

REFUSAL = 'pods "x" is forbidden: violates PodSecurity "restricted"'
_clusters: dict[Path, Cluster] = {}
_fleets: dict[Path, list[KubernetesFleet]] = {}


def fake(place: Path) -> KubernetesFleet:
    if place not in _clusters:
        _clusters[place] = FakeCluster(place / "cluster")
    return open_fleet(place, _clusters[place])


def open_fleet(place: Path, cluster: Cluster, **wishes: float) -> KubernetesFleet:
    """A fleet whose pods wait for somebody to end them."""
    return open_fleet_of(place, cluster, lambda: 1, notes=None, **wishes)


def open_fleet_of(
    place: Path, cluster: Cluster, epoch: Callable[[], int], *, notes: Path | None = None, **wishes: float
) -> KubernetesFleet:
    """The fleet of one controller of several. Its records are at the place, unless it has `notes` of its own."""
    shape = PodShape(run="lab", namespace=cluster.namespace, image="lab/holdfast:1", gpus=1, grace_s=3.0)
    asked = {"least": 1, "gather_s": 0.0, "avoid_s": 3600.0} | wishes
    fleet = KubernetesFleet(
        NotesFolder(notes or place),
        shape,
        FleetWishes(
            command=lambda node: ("sleep", "1000"),
            files=lambda node: {"token": f"token-of-{node}".encode()},
            least=int(asked["least"]),
            gather_s=asked["gather_s"],
            avoid_s=asked["avoid_s"],
        ),
        KubernetesClient(cluster.config, cluster.namespace, epoch),
        epoch,
    )
    _fleets.setdefault(place, []).append(fleet)
    return fleet


async def close(place: Path) -> None:
    for fleet in _fleets.pop(place, ()):
        await fleet.close()
    if place in _clusters:
        _clusters.pop(place).close()


def alive(place: Path, node: str) -> bool:
    return _clusters[place].machines.process_of(node) is not None


def lose(place: Path, node: str) -> None:
    _clusters[place].machines.kill(node)


def hold(place: Path, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    machines = _clusters[place].machines
    machines.held = True

    def let_go() -> None:
        machines.held = False

    return let_go


def cut(place: Path, patch: pytest.MonkeyPatch) -> None:
    client = _fleets[place][-1]._client
    create = client.create_pod

    async def create_and_end(manifest: Manifest) -> PodView:
        await create(manifest)
        raise Cut

    patch.setattr(client, "create_pod", create_and_end)


def doubt(place: Path, node: str, host: str) -> Callable[[], None]:
    """Its host's kubelet is not heard."""
    machines = _clusters[place].machines
    machines.silence(host)
    return lambda: machines.wake(host)


def refuse(place: Path, patch: pytest.MonkeyPatch) -> str:
    cluster = _clusters[place]
    assert isinstance(cluster, FakeCluster)
    cluster.fake.objects.refusal = REFUSAL
    return "violates PodSecurity"
