"""Which controller of a run on Kubernetes acts: the lease, the pods of a later one, and who is cut off; on the fake."""

import asyncio
import contextlib
import copy
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from lightkube import KubeConfig

from holdfast.controller_interfaces import FleetRefusal
from holdfast.fleet.kubernetes_client import KubernetesClient
from holdfast.fleet.kubernetes_lease import KubernetesLease
from holdfast.fleet.pod_manifest import NODE_LABEL
from holdfast.journal.journal_errors import LeaseLostError
from holdfast.journal.lease_term import boot_time, no_lease
from holdfast.model.action import Dismissal
from tests.cli.driver import PATIENCE_S, until
from tests.fleet.test_kubernetes_fleet import UP, Lab, lab
from tests.kube import places
from tests.kube.cluster import write_kubeconfig

pytestmark = pytest.mark.e2e
__all__ = ["lab"]


def stray(lab: Lab, node: str) -> dict[str, Any]:
    """A pod like others of the run, of which there is no record."""
    [found] = [copy.deepcopy(one) for (kind, _), one in lab.objects.held.items() if kind == "pods"]
    meta = {key: found["metadata"][key] for key in ("labels", "ownerReferences", "namespace")}
    meta["labels"] = meta["labels"] | {NODE_LABEL: node}
    spec = {key: value for key, value in found["spec"].items() if key != "nodeName"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta | {"name": f"lab-{node}"}, "spec": spec}


class OneSidedWall:
    """A way to the API server that can be cut for those who go by it, and for nobody else."""

    def __init__(self, url: str, folder: Path) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._to, self._listener = (host, int(port)), socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        folder.mkdir()
        own = write_kubeconfig(folder, f"http://127.0.0.1:{self._listener.getsockname()[1]}", "none")
        self.config = KubeConfig.from_file(str(own))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(self._to)
                self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                target.sendall(content)

    def cut(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # which wakes whoever accepts
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        for one in self._open:
            one.close()


async def test_a_controller_that_slept_deletes_no_pod_of_its_successor(lab: Lab, tmp_path: Path) -> None:
    """Its records are older than what there is. Nobody has told it yet that its lease is over."""
    [known] = await lab.up(1)
    copy = tmp_path / "successor"
    copy.mkdir()
    (copy / "pods.json").write_bytes((lab.place / "pods.json").read_bytes())
    successor = places.open_fleet_of(lab.place, lab.cluster, lambda: 2, notes=copy)
    [new] = await successor.acquire(1)
    await lab.until_all_of(successor, lambda seen: seen[new].state is UP)
    with pytest.raises(LeaseLostError, match="controller 2 "):
        await lab.until_all(lambda seen: False)  # until its watch has seen the pod
    assert "deletionTimestamp" not in lab.pod(new)["metadata"], "it is no stray"
    await successor.close()
    later = places.open_fleet_of(lab.place, lab.cluster, lambda: 3)  # as one that has the older records for its own
    await lab.until_all_of(later, lambda seen: ("pods", f"lab-{new}") not in lab.objects.held)
    assert lab.machines.process_of(known) is not None
    await later.close()


async def test_without_its_lease_a_fleet_changes_nothing(lab: Lab) -> None:
    lost = False

    def epoch() -> int:
        if lost:
            raise LeaseLostError("another has it")
        return 1

    fleet = places.open_fleet_of(lab.place, lab.cluster, epoch)
    [node] = await fleet.acquire(1)
    await lab.until_all_of(fleet, lambda seen: seen[node].state is UP)
    lab.machines.held = True
    lab.objects.create("pods", lab.cluster.namespace, stray(lab, "n9"))
    lost, before = True, lab.objects.version
    for act in (fleet.survey, lambda: fleet.acquire(1), lambda: fleet.give_back(node, "evicted", Dismissal.EVICTED)):
        with pytest.raises(LeaseLostError):
            await act()
    assert lab.objects.version == before, "nothing was asked of Kubernetes but how things are"
    await fleet.close()
    lab.objects.delete("pods", "lab-n9", 0)


def short_lease(monkeypatch: pytest.MonkeyPatch, lasts_s: float) -> None:
    for name, value in (("_RENEW_S", 0.05), ("_LOOK_S", 0.05), ("LASTS_S", lasts_s), ("_MARGIN_S", 0.1)):
        monkeypatch.setattr(f"holdfast.fleet.kubernetes_lease.{name}", value)


async def test_one_controller_at_a_time_has_the_lease(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    short_lease(monkeypatch, 2.0)
    said: list[str] = []

    def lease(holder: str) -> KubernetesLease:
        client = KubernetesClient(lab.cluster.config, lab.cluster.namespace, no_lease)
        return KubernetesLease(client, "lab", holder, lab.place / f"lease-of-{holder}", said.append)

    first, second, again = lease("a"), lease("b"), lease("a")
    await first.take()
    first.check()
    keeping = asyncio.create_task(first.keep())
    await again.take()  # of the same front: it need not wait
    lab.objects.broken = True
    await again.take()  # nor for an API server that is away, as long as the lease lasts
    again.check()
    assert "going on" in said.pop()
    lab.objects.broken = False
    waiting = asyncio.create_task(second.take())
    await asyncio.sleep(2.5)
    assert not waiting.done() and said == ["the lease of lab is held by a; waiting until it is free"]
    keeping.cancel()
    await asyncio.wait_for(waiting, PATIENCE_S)
    second.check()
    with pytest.raises(LeaseLostError):
        first.check()
    first._term.begin(boot_time())  # as if it did not know
    with pytest.raises(LeaseLostError, match="another controller, b"):
        await asyncio.wait_for(first.keep(), PATIENCE_S)
    await second.let_go()
    assert ("leases", "lab") not in lab.objects.held
    for one in (first, again):
        await one.let_go()


async def test_a_controller_that_is_cut_off_from_kubernetes_ends_before_another_can_take_over(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes itself may answer others: nobody who is cut off can know."""
    short_lease(monkeypatch, 1.0)
    said: list[str] = []

    def lease(holder: str, config: KubeConfig) -> KubernetesLease:
        client = KubernetesClient(config, lab.cluster.namespace, no_lease)
        return KubernetesLease(client, "lab", holder, lab.place / f"lease-of-{holder}", said.append)

    wall = OneSidedWall(lab.cluster.fake.url, lab.place / "wall")
    cut_off, near = lease("a", wall.config), lease("b", lab.cluster.config)
    await cut_off.take()
    keeping = asyncio.create_task(cut_off.keep())
    taking = asyncio.create_task(near.take())
    await asyncio.sleep(1.5)
    cut_off.check()
    assert not keeping.done() and not taking.done(), "it is renewed"
    wall.cut()
    with pytest.raises(LeaseLostError):
        await asyncio.wait_for(keeping, PATIENCE_S)
    with pytest.raises(LeaseLostError):
        cut_off.check()
    assert not taking.done(), "there is a time in which nobody may act, and none in which two may"
    again = lease("a", wall.config)
    waiting = asyncio.create_task(again.take())  # the next controller there: what was left of the lease is over
    await asyncio.wait_for(taking, PATIENCE_S)
    near.check()
    assert not waiting.done()
    waiting.cancel()
    wall.close()
    for one in (near, cut_off, again):
        await one.let_go()


async def test_a_run_that_has_begun_is_not_ended_for_want_of_a_right_to_its_lease(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody replaces the role while the controller restarts: ranks train on, and the right may come back. A run that
    has never begun ends with the sentence of Kubernetes."""
    short_lease(monkeypatch, 1.0)
    monkeypatch.setattr("holdfast.fleet.kubernetes_client._RIGHTS_S", 0.0)
    said: list[str] = []

    def lease(holder: str) -> KubernetesLease:
        client = KubernetesClient(lab.cluster.config, lab.cluster.namespace, no_lease)
        return KubernetesLease(client, "lab", holder, lab.place / "lease", said.append)

    lab.objects.forbidden.add("get leases")
    first = lease("a")
    with pytest.raises(FleetRefusal, match="cannot get"):
        await first.take()
    lab.objects.forbidden.clear()
    await first.take()
    lab.objects.forbidden.add("get leases")
    successor = lease("b")
    taking = asyncio.create_task(successor.take())
    refused = lab.objects.refused
    await asyncio.to_thread(until, lambda: lab.objects.refused > refused + 2, "refusals")
    assert not taking.done()
    [told] = said
    assert told.startswith("the lease of lab cannot be taken yet: ") and "cannot get" in told
    lab.objects.forbidden.clear()
    await asyncio.wait_for(taking, PATIENCE_S)
    successor.check()
    for one in (successor, first):
        await one.let_go()


async def test_a_right_to_the_lease_that_is_missing_is_told_at_once(lab: Lab) -> None:
    """It may come within the time for which it is asked for; a person who waits hears of it before that."""
    said: list[str] = []
    client = KubernetesClient(lab.cluster.config, lab.cluster.namespace, no_lease)
    lease = KubernetesLease(client, "lab", "a", lab.place / "lease", said.append)
    lab.objects.forbidden.add("get leases")
    taking = asyncio.create_task(lease.take())
    await asyncio.to_thread(until, lambda: lab.objects.refused > 2, "refusals")
    assert not taking.done()
    [told] = said
    assert told.startswith("the lease of lab cannot be taken yet: Kubernetes says: ") and "cannot get" in told
    lab.objects.forbidden.clear()
    await asyncio.wait_for(taking, PATIENCE_S)
    await lease.let_go()
