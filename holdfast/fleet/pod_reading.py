"""Reads Kubernetes' status of a pod and of its machine as a fleet's report about a node."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from holdfast.fleet.pod_manifest import EPOCH_NOTE
from holdfast.model.fleet_node_reports import FleetNode, FleetState

# Labels that say where a machine is, from wide to narrow. Clusters have some of them, rarely all.
PLACES = (
    "topology.kubernetes.io/zone",
    "topology.k8s.aws/network-node-layer-1",
    "topology.k8s.aws/network-node-layer-2",
    "topology.k8s.aws/network-node-layer-3",
    "cloud.google.com/gce-topology-block",
    "cloud.google.com/gce-topology-subblock",
    "network.topology.nvidia.com/core",
    "network.topology.nvidia.com/spine",
    "network.topology.nvidia.com/leaf",
    "network.topology.nvidia.com/accelerator",
    "topology.kubernetes.io/rack",
)
# The machine's own doing: its devices failed, or it came back from a restart without the container.
_MACHINE_FAULTS = ("UnexpectedAdmissionError", "ContainerStatusUnknown", "NodeLost")
_ON_THE_WAY = ("ContainerCreating", "PodInitializing")  # why every container waits at first
_NOT_READY = "its pod is not ready, and its machine cannot be asked for"
_LONGEST = 200  # characters of a reason: schedulers count all machines of a cluster


class _Ended(msgspec.Struct, frozen=True, rename="camel"):
    exit_code: int = 0
    reason: str = ""
    message: str = ""


class _Waiting(msgspec.Struct, frozen=True):
    reason: str = ""
    message: str = ""


class _ContainerState(msgspec.Struct, frozen=True):
    running: dict[str, Any] | None = None
    terminated: _Ended | None = None
    waiting: _Waiting | None = None


class _Container(msgspec.Struct, frozen=True):
    name: str = ""
    state: _ContainerState = _ContainerState()


class _Condition(msgspec.Struct, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""


class _PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    start_time: datetime | None = None
    conditions: tuple[_Condition, ...] = ()
    container_statuses: tuple[_Container, ...] = ()
    init_container_statuses: tuple[_Container, ...] = ()


class _PodMeta(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None


class _PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""
    active_deadline_seconds: int = 0


class PodView(msgspec.Struct, frozen=True):
    """The parts of a pod that a fleet reads."""

    metadata: _PodMeta
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()

    @property
    def epoch(self) -> int:
        """The epoch of the controller that made the pod; 0 if nobody noted it."""
        noted = self.metadata.annotations.get(EPOCH_NOTE, "")
        return int(noted) if noted.isdecimal() and noted.isascii() else 0

    @property
    def containers(self) -> tuple[_Container, ...]:
        return (*self.status.init_container_statuses, *self.status.container_statuses)


class _HostStatus(msgspec.Struct, frozen=True):
    conditions: tuple[_Condition, ...] = ()


class HostView(msgspec.Struct, frozen=True):
    """What a fleet reads about a machine. Kubernetes calls the machine a node."""

    metadata: _PodMeta = _PodMeta()
    status: _HostStatus = _HostStatus()

    @property
    def trouble(self) -> str:
        """Why the machine's kubelet cannot be relied on; "" if it can."""
        for one in self.status.conditions:
            if one.type == "Ready" and one.status != "True":
                return f"its machine {self.metadata.name} is not ready: {one.message or one.reason or one.status}"
        return ""

    @property
    def near(self) -> tuple[str, ...]:
        return tuple(self.metadata.labels[label] for label in PLACES if label in self.metadata.labels)


def view_pod(pod: Mapping[str, Any]) -> PodView:
    return msgspec.convert(pod, PodView)


def view_host(host: Mapping[str, Any]) -> HostView:
    return msgspec.convert(host, HostView)


def describe_pod(pod: PodView, host: HostView | None = None, *, removed: bool = False) -> FleetNode:
    """Return the fleet's report on the pod's node. With `removed`, `pod` is the last state of a pod that is gone."""
    name, near = pod.spec.node_name, host.near if host else ()
    if pod.status.phase in ("Succeeded", "Failed") or removed:
        reason = _ending_text(pod)
        if not has_ended(pod, removed=removed):
            why = "its pod was removed by force" if removed else reason
            return FleetNode(state=FleetState.UNKNOWN, reason=f"{why}; containers may run on", host=name, near=near)
        failed = any(fault in _MACHINE_FAULTS for fault in _faults_of(pod))
        return FleetNode(state=FleetState.GONE, reason=reason, failed=failed, host=name, near=near)
    if not name:
        return FleetNode(state=FleetState.QUEUED, reason=_queue_text(pod))
    if trouble := host.trouble if host else _NOT_READY if is_in_doubt(pod) else "":
        return FleetNode(state=FleetState.UNKNOWN, reason=trouble, host=name, near=near)
    up = any(one.state.running is not None for one in pod.status.container_statuses)
    state = FleetState.UP if up else FleetState.STARTING
    reason = _notice_text(pod) if up else _start_text(pod)
    return FleetNode(state=state, reason=reason, host=name, near=near, ends_at=_ends_at(pod))


def has_ended(pod: PodView, *, removed: bool = False) -> bool:
    """Return whether it is certain that nothing of the pod runs or will run.

    A kubelet reports that the containers have ended before it removes a pod. If somebody else removes the pod by force,
    the last report may still say that they run."""
    if any(one.state.running is not None for one in pod.containers):
        return False
    if pod.status.phase in ("Succeeded", "Failed"):
        return True
    return removed and (not pod.spec.node_name or bool(pod.containers))


def is_in_doubt(pod: PodView) -> bool:
    """Return whether the pod runs but is not ready. Its machine may be silent, so the caller checks the machine."""
    return pod.status.phase == "Running" and any(
        one.type == "Ready" and one.status != "True" for one in pod.status.conditions
    )


def _ends_at(pod: PodView) -> float:
    ends = []
    if pod.metadata.deletion_timestamp:  # which is when the grace is over
        ends.append(pod.metadata.deletion_timestamp.timestamp())
    if pod.spec.active_deadline_seconds and pod.status.start_time:
        ends.append(pod.status.start_time.timestamp() + pod.spec.active_deadline_seconds)
    return min(ends, default=0.0)


def _queue_text(pod: PodView) -> str:
    for one in pod.status.conditions:
        if one.type == "PodScheduled" and one.status != "True":
            return _cut(": ".join(filter(None, (one.reason, one.message))))
    return ""


def _start_text(pod: PodView) -> str:
    """Return why a pod with a machine does not start; "" if it has only not started yet."""
    for one in pod.containers:
        if one.state.waiting and one.state.waiting.reason not in _ON_THE_WAY:
            return _cut(": ".join(filter(None, (one.state.waiting.reason, one.state.waiting.message))))
    return ""


def _notice_text(pod: PodView) -> str:
    """Return why a running pod is about to be removed; "" if it is not."""
    for one in pod.status.conditions:
        if one.type == "DisruptionTarget" and one.status == "True":
            return _cut(": ".join(filter(None, (one.reason, one.message))))
    return "its pod is being deleted" if pod.metadata.deletion_timestamp else ""


def _ending_text(pod: PodView) -> str:
    status = pod.status
    ends = [one.state.terminated for one in pod.containers if one.state.terminated]
    bad = next((end for end in ends if end.exit_code), None)
    told = ": ".join(filter(None, (status.reason, status.message)))
    if bad is not None and not status.reason:
        told = f"its container ended with code {bad.exit_code}" + (f" ({bad.reason})" if bad.reason else "")
    return _cut(told or _notice_text(pod) or ("its containers have ended" if ends else "its pod was removed"))


def _faults_of(pod: PodView) -> list[str]:
    ends = [one.state.terminated.reason for one in pod.containers if one.state.terminated]
    return [pod.status.reason, *ends]


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
