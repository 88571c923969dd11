"""What Kubernetes says of a pod, as a fleet's word about a node: only proof is called proof."""

from typing import Any

import pytest

from holdfast.fleet.pod_reading import describe_pod, has_ended, is_in_doubt, view_host, view_pod
from holdfast.model.fleet_node_reports import FleetNode, FleetState

RUNNING = {"name": "holdfast", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
WAITING = {"name": "holdfast", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}


def ended(code: int = 0, reason: str = "") -> dict[str, Any]:
    return {"name": "holdfast", "state": {"terminated": {"exitCode": code, "reason": reason}}}


def pod(phase: str, *containers: dict[str, Any], host: str = "gpu-1", **more: Any) -> dict[str, Any]:
    """A pod; `more` is of its status, except for what belongs to its metadata."""
    meta = {"name": "r-n0", "labels": {"holdfast.dev/node": "n0"}} | more.pop("metadata", {})
    spec = ({"nodeName": host} if host else {}) | more.pop("spec", {})
    return {"metadata": meta, "spec": spec, "status": {"phase": phase, "containerStatuses": containers, **more}}


def seen(found: dict[str, Any], host: dict[str, Any] | None = None, removed: bool = False) -> FleetNode:
    return describe_pod(view_pod(found), view_host(host) if host else None, removed=removed)


def condition(type: str, status: str, reason: str = "", message: str = "") -> dict[str, str]:
    return {"type": type, "status": status, "reason": reason, "message": message}


SILENT = "Kubelet stopped posting node status."


def machine(ready: str, **labels: str) -> dict[str, Any]:
    told = condition("Ready", ready, "NodeStatusUnknown", SILENT)
    return {"metadata": {"name": "gpu-1", "labels": labels}, "status": {"conditions": [told]}}


def test_a_pod_without_a_machine_is_queued_with_the_words_of_the_scheduler() -> None:
    why = condition(
        "PodScheduled", "False", "Unschedulable", "0/9 nodes are available:\n 9 Insufficient nvidia.com/gpu."
    )
    told = seen(pod("Pending", host="", conditions=[why]))
    assert told.state is FleetState.QUEUED and told.host == ""
    assert told.reason == "Unschedulable: 0/9 nodes are available: 9 Insufficient nvidia.com/gpu."
    assert len(seen(pod("Pending", host="", conditions=[why | {"message": "x" * 999}])).reason) == 200


def test_a_pod_with_a_machine_is_starting_until_its_container_runs() -> None:
    told = seen(pod("Pending", WAITING))
    assert (told.state, told.host) == (FleetState.STARTING, "gpu-1")
    assert told.reason == "ImagePullBackOff: no such image"
    for first in ("ContainerCreating", "PodInitializing"):
        told = seen(pod("Pending", {"name": "holdfast", "state": {"waiting": {"reason": first}}}))
        assert (told.state, told.reason) == (FleetState.STARTING, ""), "nothing is wrong yet"
    assert seen(pod("Running", RUNNING)).state is FleetState.UP


@pytest.mark.parametrize(
    ("found", "removed", "state", "failed"),
    [
        (pod("Succeeded", ended()), False, FleetState.GONE, False),
        (pod("Failed", ended(137, "OOMKilled")), False, FleetState.GONE, False),
        (pod("Failed", ended(137, "ContainerStatusUnknown")), False, FleetState.GONE, True),
        (pod("Failed", reason="UnexpectedAdmissionError", message="no GPU"), False, FleetState.GONE, True),
        (pod("Failed", reason="Evicted", message="low on memory"), False, FleetState.GONE, False),
        # The pod of a machine that was taken out of the cluster is failed by others than its kubelet.
        (pod("Failed", RUNNING, reason="NodeLost"), False, FleetState.UNKNOWN, False),
        (pod("Running", RUNNING), True, FleetState.UNKNOWN, False),  # removed by force
        (pod("Running", ended()), True, FleetState.GONE, False),
        (pod("Pending", host=""), True, FleetState.GONE, False),  # it never had a machine
        (pod("Pending"), True, FleetState.UNKNOWN, False),  # it had one, and nobody knows what came of it
        (pod("Pending", WAITING), True, FleetState.GONE, False),
    ],
)
def test_only_proof_is_an_end(found: dict[str, Any], removed: bool, state: FleetState, failed: bool) -> None:
    told = seen(found, removed=removed)
    assert (told.state, told.failed) == (state, failed) and told.reason
    assert has_ended(view_pod(found), removed=removed) == (state is FleetState.GONE)


def test_an_end_is_told_with_its_reason() -> None:
    assert seen(pod("Failed", ended(137, "OOMKilled"))).reason == "its container ended with code 137 (OOMKilled)"
    assert seen(pod("Failed", reason="Evicted", message="low on memory")).reason == "Evicted: low on memory"
    assert seen(pod("Succeeded", ended())).reason == "its containers have ended"


def test_a_machine_that_does_not_answer_proves_nothing() -> None:
    up = pod("Running", RUNNING, conditions=[condition("Ready", "False")])
    assert is_in_doubt(view_pod(up)) and not is_in_doubt(view_pod(pod("Running", RUNNING)))
    told = seen(up, machine("Unknown"))
    assert told.state is FleetState.UNKNOWN and SILENT in told.reason
    assert seen(up, machine("True")).state is FleetState.UP, "the machine is well: the pod has a probe of its own"
    assert seen(up).state is FleetState.UNKNOWN, "whoever may not ask for machines does not know"
    assert seen(pod("Failed", ended(1)), machine("Unknown")).state is FleetState.GONE, "what was proven stays so"


def test_an_end_is_seen_ahead() -> None:
    deleted = {"deletionTimestamp": "1970-01-01T00:01:40Z"}
    told = seen(pod("Running", RUNNING, metadata=deleted))
    assert (told.state, told.ends_at, told.reason) == (FleetState.UP, 100.0, "its pod is being deleted")
    why = condition("DisruptionTarget", "True", "PreemptionByScheduler", "make room for another")
    told = seen(pod("Running", RUNNING, metadata=deleted, conditions=[why]))
    assert told.reason == "PreemptionByScheduler: make room for another"
    limit = pod("Running", RUNNING, spec={"activeDeadlineSeconds": 50}, startTime="1970-01-01T00:00:10Z")
    assert seen(limit).ends_at == 60.0 and seen(pod("Running", RUNNING)).ends_at == 0.0


def test_labels_say_where_a_machine_is_from_wide_to_narrow() -> None:
    labels = {"topology.kubernetes.io/rack": "r7", "topology.kubernetes.io/zone": "z1", "color": "red"}
    assert seen(pod("Running", RUNNING), machine("True", **labels)).near == ("z1", "r7")
