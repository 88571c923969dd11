"""The manifests of a job's pods and of their tokens: the user's template, and what holdfast adds to it."""

import base64
import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

Manifest = dict[str, Any]

RUN_LABEL, NODE_LABEL = "holdfast.dev/run", "holdfast.dev/node"
EVICTED_TAINT = "holdfast.dev/evicted"
EPOCH_NOTE = "holdfast.dev/epoch"  # the annotation that says which controller of the run made a pod
CONTAINER = "holdfast"  # of a template with several, the one that becomes the node
_SECRET_MODE = 0o440  # whatever user a container runs as has the pod's group; a process that changes its user has not
_GROUP = 10001  # where the template does not say who runs
SECRET_FOLDER, HOME_FOLDER = "/etc/holdfast", "/var/lib/holdfast"
MANAGED_BY = ("app.kubernetes.io/managed-by", "holdfast")
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_GROUP_LABEL, _GROUP_COUNT = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
_LONGEST_NAME = 50  # of a run, so that a node's number and a label's 63 characters have room


class PodShape(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all pods of a job share, such as image and GPUs."""

    run: str  # the job's name among Kubernetes objects
    namespace: str
    image: str = ""  # "": the template's
    template: Manifest = {}  # the user's pod, or its spec alone
    gpus: int = 0  # of a node, where the template asks for no resources
    folder: str = ""  # in which the script is started; "": the image's
    group: int = 1  # pods of the whole job, standbys included
    grace_s: float = 60.0  # between SIGTERM and SIGKILL
    endure_s: float = 300.0  # as long a pod is left on a machine that does not answer

    @property
    def is_queued(self) -> bool:
        """Return whether the pods wait in a queue of Kueue, which admits all pods of a job at the same time."""
        return _QUEUE_LABEL in _whole_pod(self.template)["metadata"].get("labels", {})


class AvoidedHosts(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts that a new pod avoids."""

    never: tuple[str, ...] = ()  # it waits rather than run there
    last: tuple[str, ...] = ()  # it runs there if there is no other


NOWHERE = AvoidedHosts()


def object_name(run_id: str) -> str:
    """Return a run's id as a valid name of Kubernetes objects: lower-case letters, digits and dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", run_id.lower())[:_LONGEST_NAME].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def pod_name(run: str, node: str) -> str:
    return f"{run}-{node}"


def find_template_fault(template: object) -> str:
    """Return what is wrong with a template, in one sentence; "" if it can be used."""
    if not isinstance(template, dict):
        return "it is not a mapping"
    if (kind := template.get("kind", "Pod")) != "Pod":
        return f"it is a {kind}, not a Pod"
    pod = _whole_pod(template)
    if not isinstance(pod["spec"], dict) or not isinstance(pod["metadata"], dict):
        return "its metadata and spec are not mappings"
    containers = pod["spec"].get("containers", [])
    if not isinstance(containers, list) or not all(isinstance(one, dict) for one in containers):
        return "its containers are not a list of mappings"
    if len(containers) > 1 and not any(one.get("name") == CONTAINER for one in containers):
        return f"it has several containers; name the one that trains {CONTAINER}"
    return ""


def template_image(template: Manifest) -> str:
    containers = _whole_pod(template)["spec"].get("containers", [])
    return str(_own_container(containers).get("image", "")) if containers else ""


def make_pod(
    shape: PodShape, node: str, command: Sequence[str], owner: Manifest, avoided: AvoidedHosts = NOWHERE
) -> Manifest:
    """Return the pod of a node: it runs `command`, belongs to `owner` and stays off the `avoided` hosts."""
    pod = _whole_pod(shape.template)
    meta, spec = pod["metadata"], pod["spec"]
    name = pod_name(shape.run, node)
    meta |= {"name": name, "namespace": shape.namespace, "ownerReferences": [owner]}
    meta["labels"] = meta.get("labels", {}) | node_labels(shape.run, node)
    if shape.is_queued and shape.group > 1:
        meta["labels"] |= {_GROUP_LABEL: shape.run}
        meta["annotations"] = meta.get("annotations", {}) | {_GROUP_COUNT: str(shape.group)}
    spec["restartPolicy"] = "Never"  # holdfast decides where a node is replaced
    spec.setdefault("terminationGracePeriodSeconds", round(shape.grace_s))
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("enableServiceLinks", False)
    spec["tolerations"] = [*spec.get("tolerations", []), *_tolerations(spec, shape.endure_s)]
    spec.setdefault("topologySpreadConstraints", [_spread_rule(shape.run)])
    _avoid_hosts(spec, avoided)
    containers = spec.setdefault("containers", [{}])
    _fill_container(_own_container(containers), shape, command)
    _add_volumes(spec, _own_container(containers), name)
    _let_group_read(spec, _own_container(containers))
    return pod


def make_secret(shape: PodShape, node: str, files: Mapping[str, bytes], owner: Manifest) -> Manifest:
    """Return the secret with a node's token and job, which must not be readable in the pod's manifest."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": pod_name(shape.run, node),
            "namespace": shape.namespace,
            "labels": node_labels(shape.run, node),
            "ownerReferences": [owner],
        },
        "immutable": True,
        "data": {name: base64.b64encode(content).decode() for name, content in files.items()},
    }


def owner_reference(run: str, uid: str) -> Manifest:
    """Return an owner reference to the run's lease: when the lease goes, Kubernetes removes the run's objects, too."""
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "name": run, "uid": uid}


def run_labels(run: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "holdfast", MANAGED_BY[0]: MANAGED_BY[1], RUN_LABEL: run}


def node_labels(run: str, node: str) -> dict[str, str]:
    return run_labels(run) | {"app.kubernetes.io/component": "node", NODE_LABEL: node}


def _whole_pod(template: Manifest) -> Manifest:
    """Return a copy of the template as a pod; a template may be a pod, or its spec alone."""
    own = copy.deepcopy(template)
    if not {"spec", "metadata", "kind"}.intersection(own):
        own = {"spec": own}
    own.setdefault("metadata", {})
    own.setdefault("spec", {})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": own["metadata"], "spec": own["spec"]}


def _own_container(containers: list[Manifest]) -> Manifest:
    return next((one for one in containers if one.get("name") == CONTAINER), containers[0])


def _fill_container(own: Manifest, shape: PodShape, command: Sequence[str]) -> None:
    own.setdefault("name", CONTAINER)
    if shape.image:
        own["image"] = shape.image
    own |= {"command": list(command), "args": []}
    if shape.folder:
        own.setdefault("workingDir", shape.folder)
    if "resources" not in own and shape.gpus:
        own["resources"] = {"limits": {"nvidia.com/gpu": str(shape.gpus)}}
    told = {one.get("name") for one in own.get("env", [])}
    # The machine's name in the cluster is its identity: a container cannot see the machine's own.
    env: list[Manifest] = [
        {"name": "HOLDFAST_HOST_ID", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "HOLDFAST_HOME", "value": HOME_FOLDER},
    ]
    own["env"] = [*own.get("env", []), *(one for one in env if one["name"] not in told)]


def _add_volumes(spec: Manifest, own: Manifest, secret: str) -> None:
    """Mount the secret, a folder for the run's files, and shared memory (the default has only 64 MiB)."""
    ours: tuple[tuple[str, str, Manifest], ...] = (
        ("holdfast-secret", SECRET_FOLDER, {"secret": {"secretName": secret, "defaultMode": _SECRET_MODE}}),
        ("holdfast-home", HOME_FOLDER, {"emptyDir": {}}),
        ("holdfast-shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}}),
    )
    taken = {mount.get("mountPath") for mount in own.get("volumeMounts", [])}
    wanted = [(name, path, source) for name, path, source in ours if path not in taken]
    own["volumeMounts"] = [
        *own.get("volumeMounts", []),
        *({"name": name, "mountPath": path, "readOnly": path == SECRET_FOLDER} for name, path, _ in wanted),
    ]
    spec["volumes"] = [*spec.get("volumes", []), *({"name": name, **source} for name, _, source in wanted)]


def _let_group_read(spec: Manifest, own: Manifest) -> None:
    """Give the pod a group that can read its secrets; volumes that already have this group are left as they are."""
    security = spec.setdefault("securityContext", {})
    user = own.get("securityContext", {}).get("runAsUser") or security.get("runAsUser")
    if "fsGroup" not in security:
        security |= {"fsGroup": user or _GROUP}
        security.setdefault("fsGroupChangePolicy", "OnRootMismatch")


def _tolerations(spec: Manifest, endure_s: float) -> list[Manifest]:
    told = {(one.get("key"), one.get("effect")) for one in spec.get("tolerations", [])}
    ours: list[Manifest] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    for trouble in ("not-ready", "unreachable"):  # how long that may last is for the agents to say, which train on
        key = f"node.kubernetes.io/{trouble}"
        ours.append(
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": max(1, round(endure_s))}
        )
    return [one for one in ours if (one["key"], one["effect"]) not in told]


def _spread_rule(run: str) -> Manifest:
    """Return the rule that spreads a run's pods over different machines where possible."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {RUN_LABEL: run}},
    }


def _avoid_hosts(spec: Manifest, avoided: AvoidedHosts) -> None:
    """Exclude hosts in every node selector term, since a pod may run wherever one term matches."""
    if not (avoided.never or avoided.last):
        return
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    if avoided.never:
        required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
        for term in required.setdefault("nodeSelectorTerms", [{}]):
            term["matchExpressions"] = [*term.get("matchExpressions", []), _elsewhere(avoided.never)]
    if avoided.last:
        wish = {"weight": 100, "preference": {"matchExpressions": [_elsewhere(avoided.last)]}}
        affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", []).append(wish)


def _elsewhere(hosts: Iterable[str]) -> Manifest:
    return {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": sorted(hosts)}
