"""What a fleet of pods does when Kubernetes, a machine or the API server fails; on the fake API server."""

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.controller_interfaces import FleetRefusal
from holdfast.fleet.kubernetes_client import KubernetesError
from holdfast.fleet.kubernetes_fleet import KubernetesFleet
from holdfast.model.action import Dismissal
from holdfast.model.fleet_node_reports import FleetNode, FleetState
from tests.cli.driver import PATIENCE_S, until
from tests.kube import places
from tests.kube.cluster import FakeCluster

pytestmark = pytest.mark.e2e

UP, GONE, QUEUED, UNKNOWN = FleetState.UP, FleetState.GONE, FleetState.QUEUED, FleetState.UNKNOWN


class Lab:
    def __init__(self, place: Path) -> None:
        self.place, self.cluster = place, FakeCluster(place / "cluster")
        self.objects, self.machines = self.cluster.fake.objects, self.cluster.machines
        self.fleet = places.open_fleet(place, self.cluster)

    async def reopen(self, **wishes: float) -> KubernetesFleet:
        await self.fleet.close()
        self.fleet = places.open_fleet(self.place, self.cluster, **wishes)
        return self.fleet

    def pod(self, node: str) -> dict[str, Any]:
        return self.objects.held["pods", f"lab-{node}"]

    def machine(self, node: str) -> str:
        return str(self.pod(node)["spec"]["nodeName"])

    async def until_all(self, fits: Callable[[dict[str, FleetNode]], bool]) -> dict[str, FleetNode]:
        until_at = time.monotonic() + PATIENCE_S
        while not fits(seen := await self.fleet.survey()):
            assert time.monotonic() < until_at, seen
            await asyncio.sleep(0.05)
        return seen

    async def until_all_of(self, fleet: KubernetesFleet, fits: Callable[[dict[str, FleetNode]], bool]) -> None:
        until_at = time.monotonic() + PATIENCE_S
        while not fits(seen := await fleet.survey()):
            assert time.monotonic() < until_at, seen
            await asyncio.sleep(0.05)

    async def up(self, count: int) -> tuple[str, ...]:
        names = await self.fleet.acquire(count)
        await self.until_all(lambda seen: all(seen[name].state is UP for name in names))
        return names


@pytest.fixture
async def lab(tmp_path: Path, no_orphans: str) -> AsyncIterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    for machine in list(lab.machines.silent):
        lab.machines.wake(machine)
    await lab.fleet.close()
    lab.cluster.close()


async def test_what_runs_on_a_machine_that_does_not_answer_is_not_said_to_have_ended(lab: Lab) -> None:
    near, far = await lab.up(2)
    where = lab.machine(far)
    await asyncio.to_thread(lab.machines.silence, where)
    seen = await lab.until_all(lambda seen: seen[far].state is UNKNOWN)
    assert f" {where} " in seen[far].reason and seen[near].state is UP
    assert seen[near].near == ("z1", "r7") and seen[far].host == where
    with pytest.raises(OSError, match=f"^whether lab-{far} .*{re.escape(seen[far].reason)}$"):
        await lab.fleet.give_back(far, "evicted")
    assert lab.machines.process_of(far) is not None, "which is why nothing may be concluded"
    assert far not in lab.fleet.nodes()
    await asyncio.to_thread(lab.machines.wake, where)
    await lab.fleet.give_back(far, "evicted")  # its kubelet ends it now: once more, and it is proven
    assert lab.machines.process_of(far) is None


async def test_a_pod_that_is_removed_by_force_may_run_on(lab: Lab) -> None:
    [node] = await lab.up(1)
    where = lab.machine(node)
    lab.machines.silent.add(where)
    lab.objects.delete("pods", f"lab-{node}", 0)
    seen = await lab.until_all(lambda seen: seen[node].state is UNKNOWN)
    assert seen[node].reason == "its pod was removed by force; containers may run on"
    with pytest.raises(OSError, match=f"^lab-{node} .* {where}$"):
        await lab.fleet.give_back(node, "evicted")


async def test_a_watch_goes_on_after_changes_were_forgotten(lab: Lab) -> None:
    first, second = await lab.up(2)
    lists = lab.objects.lists
    lab.machines.kill(first)
    await lab.until_all(lambda seen: seen[first].state is GONE)
    assert lab.objects.lists == lists, "a watch told it"
    lab.objects.forget()
    lab.machines.kill(second)
    seen = await lab.until_all(lambda seen: seen[second].state is GONE)
    assert seen[first].state is GONE and "code 137" in seen[second].reason
    assert lab.objects.lists == lists + 1, "a list had to"


async def test_an_api_server_that_is_away_says_nothing_and_is_waited_for(lab: Lab) -> None:
    stays, goes = await lab.up(2)
    away = threading.Thread(target=lab.cluster.fake.restart, args=(3.0,))
    away.start()
    until_at = time.monotonic() + PATIENCE_S

    async def survey_on() -> None:
        while time.monotonic() < until_at:
            await lab.fleet.survey()
            await asyncio.sleep(0.02)

    with pytest.raises(KubernetesError) as raised:
        await survey_on()
    assert raised.value.status == 0, "nobody answered"
    await lab.fleet.give_back(goes, "drain by me")  # it waits for the server, and ends the pod for certain
    away.join()
    assert {node: one.state for node, one in (await lab.fleet.survey()).items()} == {stays: UP}
    assert lab.machines.process_of(goes) is None


async def test_the_end_of_a_pod_is_seen_by_a_controller_that_is_refused_lists_at_first(lab: Lab) -> None:
    """API servers that have just started know some rights before others."""
    [node] = await lab.up(1)
    lab.machines.kill(node)
    await asyncio.to_thread(until, lambda: lab.pod(node)["status"]["phase"] == "Failed", "the end of its container")
    await lab.reopen()
    lab.objects.forbidden.add("list pods")
    ending = asyncio.create_task(lab.fleet.give_back(node, "drain by me"))
    await asyncio.to_thread(until, lambda: lab.objects.refused > 3, "a refusal")
    lab.objects.forbidden.clear()
    await ending
    assert not lab.fleet.nodes()
    await asyncio.to_thread(until, lambda: ("pods", f"lab-{node}") not in lab.objects.held, "the pod's deletion")


async def test_the_secret_of_a_pod_goes_though_nobody_knows_whether_the_pod_has_ended(lab: Lab) -> None:
    [node] = await lab.up(1)
    where = lab.machine(node)
    await asyncio.to_thread(lab.machines.silence, where)
    with pytest.raises(OSError, match=f"^whether lab-{node} .* {where} "):
        await lab.fleet.give_back(node, "evicted")
    assert not [key for key in lab.objects.held if key[0] == "secrets"]


async def test_a_pod_that_nobody_knows_is_deleted(lab: Lab) -> None:
    """A controller died after it had made a pod, and before it knew: its records have no such node."""
    [node] = await lab.up(1)
    kept = (lab.place / "pods.json").read_bytes()
    [stray] = await lab.up(1)
    (lab.place / "pods.json").write_bytes(kept)
    await lab.reopen()
    seen = await lab.until_all(lambda seen: ("pods", f"lab-{stray}") not in lab.objects.held)
    assert seen.keys() == {node} and ("secrets", f"lab-{stray}") not in lab.objects.held


async def test_a_node_that_was_never_made_is_gone(lab: Lab) -> None:
    """A controller died after it had written a node down, and before it made the pod."""
    (lab.place / "pods.json").write_text('{"next": 1, "nodes": {"n0": {}}}')
    fleet = await lab.reopen()
    assert {node: one.state for node, one in (await fleet.survey()).items()} == {"n0": GONE}
    await fleet.give_back("n0", "it never came")
    assert await fleet.acquire(1) == ("n1",)


async def test_an_acquisition_that_fails_halfway_leaves_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.fleet.kubernetes_client._RIGHTS_S", 0.0)
    lab.objects.forbidden.add("create pods")
    with pytest.raises(FleetRefusal, match="cannot create"):
        await lab.fleet.acquire(3)
    lab.objects.forbidden.clear()
    assert not [key for key in lab.objects.held if key[0] in ("pods", "secrets")] and lab.fleet.nodes() == ()


async def test_a_right_that_an_api_server_does_not_know_of_yet_is_waited_for(lab: Lab) -> None:
    """One that has just started refuses everybody, until it has read who may do what."""
    lab.objects.forbidden.add("create pods")
    asking = asyncio.create_task(lab.fleet.acquire(1))
    await asyncio.to_thread(until, lambda: lab.objects.refused, "a refusal")
    lab.objects.forbidden.clear()
    assert await asking == ("n0",)


async def test_machines_that_wait_for_others_too_long_are_given_back(lab: Lab) -> None:
    lab.machines.limit = 2
    fleet = await lab.reopen(least=3, gather_s=0.5)
    names = await fleet.acquire(4)  # n0 to n3
    seen = await lab.until_all(lambda seen: all(one.state is GONE for one in seen.values()))
    assert seen.keys() == set(names)
    assert {one.reason for one in seen.values()} == {"only 2 of 3 machines came within 0.5 s, so all were given back"}
    for node in names:
        await fleet.give_back(node, "gone")
    lab.machines.limit = 3  # now there is room for the job, if not for its standby
    await (await lab.reopen(least=3, gather_s=PATIENCE_S)).acquire(4)
    seen = await lab.until_all(lambda seen: sum(one.state is UP for one in seen.values()) == 3)
    lab.machines.kill(next(node for node, one in seen.items() if one.state is UP))
    fleet = await lab.reopen(least=3, gather_s=0.01)
    for _ in range(3):
        states = sorted(one.state for one in (await fleet.survey()).values())
        assert states.count(QUEUED) == 1 and states.count(UP) >= 2, "a job that has begun keeps what it has"
        await asyncio.sleep(0.05)


def avoided_hosts(lab: Lab, node: str) -> list[str]:
    """The hosts on which a pod never runs."""
    required = lab.pod(node)["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    [rule] = required["nodeSelectorTerms"][0]["matchExpressions"]
    hosts: list[str] = rule["values"]
    return hosts


def last_hosts(lab: Lab, node: str) -> list[str]:
    """The hosts on which a pod runs only if there are no others."""
    affinity = lab.pod(node)["spec"]["affinity"]["nodeAffinity"]
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in affinity
    [wish] = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    [rule] = wish["preference"]["matchExpressions"]
    hosts: list[str] = rule["values"]
    return hosts


async def test_the_host_of_an_evicted_node_is_avoided_and_tainted_where_that_is_allowed(lab: Lab) -> None:
    nodes = await lab.up(2)
    bad, worse = (lab.machine(node) for node in nodes)
    await lab.fleet.give_back(nodes[0], "evicted", Dismissal.EVICTED)
    [taint] = lab.objects.get("nodes", bad)["spec"]["taints"]
    assert taint == {"key": "holdfast.dev/evicted", "value": "lab", "effect": "NoSchedule"}
    lab.objects.forbidden.add("patch nodes")
    await lab.fleet.give_back(nodes[1], "failed its check: gemm", Dismissal.EVICTED)
    assert "taints" not in lab.objects.get("nodes", worse)["spec"]
    [new] = await (await lab.reopen()).acquire(1)
    assert avoided_hosts(lab, new) == sorted((bad, worse))
    [other] = await (await lab.reopen(avoid_s=0.0)).acquire(1)
    assert "affinity" not in lab.pod(other)["spec"]


async def test_a_pod_asked_for_while_a_node_is_evicted_avoids_its_host(lab: Lab) -> None:
    [node] = await lab.up(1)
    bad = lab.machine(node)
    [new] = await lab.fleet.acquire(1, evicted={node})
    assert avoided_hosts(lab, new) == [bad]


async def test_the_host_of_an_evicted_pod_is_avoided_though_a_survey_has_forgotten_the_pod(lab: Lab) -> None:
    [node] = await lab.up(1)
    bad = lab.machine(node)
    lab.machines.kill(node)
    await lab.until_all(lambda seen: seen[node].state is GONE)
    async with lab.fleet._creating:  # as while a pod is made
        giving = asyncio.create_task(lab.fleet.give_back(node, "evicted"))
        for _ in range(3):
            await lab.fleet.survey()
    await giving
    [new] = await lab.fleet.acquire(1, evicted={node})
    assert avoided_hosts(lab, new) == [bad]


@pytest.mark.parametrize("given_back_first", [True, False])
async def test_the_pod_in_place_of_one_that_ended_by_itself_begins_elsewhere(lab: Lab, given_back_first: bool) -> None:
    """Whether the one is given back or the other is asked for first; the next may be on that host again."""
    [node] = await lab.up(1)
    was = lab.machine(node)
    lab.machines.kill(node)
    await lab.until_all(lambda seen: seen[node].state is GONE)
    if given_back_first:
        await lab.fleet.give_back(node, "evicted", Dismissal.GONE)
    [new] = await lab.fleet.acquire(1)
    assert last_hosts(lab, new) == [was]
    await lab.until_all(lambda seen: seen[new].state is UP)
    assert lab.machine(new) != was
    if given_back_first:
        [other] = await lab.fleet.acquire(1)
        assert "affinity" not in lab.pod(other)["spec"]
        assert "taints" not in lab.objects.get("nodes", was)["spec"]


def close_all_but(lab: Lab, host: str) -> None:
    """Cordon the other machines."""
    for name in lab.machines.names:
        if name != host:
            lab.objects.change("nodes", name, {"spec": {"unschedulable": True}})


async def test_the_pod_in_place_of_one_that_ended_by_itself_begins_there_again_if_no_other_machine_is_free(
    lab: Lab,
) -> None:
    """As in a cluster that is as large as the job: a process that was out of memory once is no reason to wait."""
    [node] = await lab.up(1)
    was = lab.machine(node)
    close_all_but(lab, was)
    lab.machines.kill(node)
    await lab.until_all(lambda seen: seen[node].state is GONE)
    await lab.fleet.give_back(node, "gone", Dismissal.GONE)
    [new] = await lab.up(1)
    assert lab.machine(new) == was


async def test_a_machine_that_cannot_pull_the_image_is_told_and_the_next_pod_begins_elsewhere(lab: Lab) -> None:
    lab.machines.imageless = {lab.machines.names[0]}
    [node] = await lab.fleet.acquire(1)
    stuck = FleetState.STARTING, 'ImagePullBackOff: Back-off pulling image "lab:1"'
    seen = await lab.until_all(lambda seen: (seen[node].state, seen[node].reason) == stuck)
    assert seen[node].host == lab.machine(node) == lab.machines.names[0]
    await lab.fleet.give_back(node, "not ready within 300 s", Dismissal.LATE)
    assert ("pods", f"lab-{node}") not in lab.objects.held
    [new] = await lab.up(1)
    assert last_hosts(lab, new) == [lab.machines.names[0]] != [lab.machine(new)]
    assert "taints" not in lab.objects.get("nodes", lab.machines.names[0])["spec"]


async def test_a_pod_that_does_not_end_is_in_nobodys_way_and_forgotten_when_it_does(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose process waits for a disk, or that has a finalizer: its machine is well, and it stays Terminating."""
    monkeypatch.setattr("holdfast.fleet.kubernetes_fleet._GRACE_S", 1.0)
    monkeypatch.setattr("holdfast.fleet.kubernetes_fleet._BEYOND_S", 1.0)
    [node] = await lab.up(1)
    lab.machines.stuck.add(node)
    with pytest.raises(OSError) as caught:  # noqa: PT011  the sentence is compared
        await lab.fleet.give_back(node, "evicted")
    assert str(caught.value) == f"lab-{node} has not ended 1 s after its grace of 1 s"
    assert lab.machines.process_of(node) is not None and lab.fleet.nodes() == ()
    [new] = await lab.up(1)
    assert new != node, "no name is used twice"
    version = lab.objects.version
    for _ in range(3):
        assert {*await lab.fleet.survey()} == {new}
    assert lab.objects.version == version, "it is not deleted again and again"
    fleet = await lab.reopen()
    assert {*await fleet.survey()} == {new} and node in (lab.place / "pods.json").read_text()
    lab.machines.stuck.clear()
    await asyncio.to_thread(until, lambda: ("pods", f"lab-{node}") not in lab.objects.held, "its end")
    await lab.until_all(lambda seen: f'"{node}"' not in (lab.place / "pods.json").read_text())


@pytest.mark.parametrize("status", [429, 503])
async def test_a_machine_that_could_not_be_looked_at_once_is_looked_at_again(lab: Lab, status: int) -> None:
    """An API server under load, or without its leader: what it knows of racks is asked for again."""
    [node] = await lab.fleet.acquire(1)
    await asyncio.to_thread(until, lambda: lab.pod(node)["spec"].get("nodeName"), "a machine")
    lab.objects.odd["get nodes"] = status, "text/plain", "later"
    with pytest.raises(KubernetesError, match=f"status {status}$"):
        await lab.until_all(lambda seen: False)
    lab.objects.odd.clear()
    seen = await lab.until_all(lambda seen: seen[node].state is UP)
    assert seen[node].near == ("z1", "r7")


async def test_a_node_that_is_only_not_needed_taints_nobody(lab: Lab) -> None:
    [node] = await lab.up(1)
    where = lab.machine(node)
    await lab.fleet.give_back(node, "the job has ended", Dismissal.ENDED)
    assert "taints" not in lab.objects.get("nodes", where)["spec"]
