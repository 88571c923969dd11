"""The machines of a cluster as tests play them: they take pods, run their commands as processes of this host, and tell
the API server what a kubelet tells."""

import base64
import contextlib
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from holdfast.fleet.pod_manifest import EVICTED_TAINT, NODE_LABEL
from tests.kube.fake_api import timestamp

Manifest = dict[str, Any]
_LOOK_S = 0.05
_BEAT_S = 1.0
_MARK = "HOLDFAST_LAB_POD"  # in the environment of everything that a pod has started


class Api:
    """Plain requests to an API server."""

    def __init__(self, url: str, token: str = "", authority: str = "") -> None:
        self._url, self._token = urlsplit(url), token
        self._tls = ssl.create_default_context(cafile=authority) if authority else None

    def ask(self, verb: str, path: str, body: Manifest | None = None, kind: str = "application/json") -> Manifest:
        host, port = self._url.hostname or "", self._url.port
        link = (
            http.client.HTTPSConnection(host, port, context=self._tls, timeout=30)
            if self._tls
            else http.client.HTTPConnection(host, port, timeout=30)
        )
        try:
            headers = {"Content-Type": kind, "Authorization": f"Bearer {self._token}"}
            link.request(verb, path, json.dumps(body) if body is not None else None, headers)
            answer = link.getresponse()
            content: Manifest = json.loads(answer.read() or b"{}")
        finally:
            link.close()
        if answer.status >= 400:
            raise OSError(answer.status, content.get("message", ""))
        return content

    def patch(self, path: str, body: Manifest) -> Manifest:
        return self.ask("PATCH", path, body, "application/merge-patch+json")


class Machines:
    """Machines by name. A thread plays their kubelets, and the scheduler if `schedules`."""

    beats = False  # whether kubelets say again and again that they are there, which Kubernetes' own controllers heed

    def __init__(self, api: Api, folder: Path, names: tuple[str, ...], namespace: str, schedules: bool = True) -> None:
        self.api, self.folder, self.names, self.namespace = api, folder, names, namespace
        self._schedules = schedules
        self.held = False  # no pod gets a machine
        self.limit = 100  # pods that have machines at one time
        self.silent: set[str] = set()  # machines whose kubelet is not heard, while what runs there runs on
        self.imageless: set[str] = set()  # machines that cannot pull an image
        self.stuck: set[str] = set()  # nodes whose pods are told to end, and do not
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.env: dict[str, str] = dict(os.environ)
        self._told: dict[str, str] = {}
        self._mark = uuid.uuid4().hex
        self._over = threading.Event()
        self._beat_at = 0.0
        for name in names:
            self._retried(lambda name=name: api.ask("POST", "/api/v1/nodes", _machine(name)))  # type: ignore[misc]
            if api.ask("GET", f"/api/v1/nodes/{name}").get("status", {}).get("conditions") is None:
                self.tell_ready(name)
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def tell_ready(self, name: str, status: str = "True") -> None:
        self._retried(lambda: self._patch_machine(name, status))

    def _patch_machine(self, name: str, status: str = "True") -> None:
        ready = {
            "type": "Ready", "status": status, "reason": "KubeletReady" if status == "True" else "NodeStatusUnknown",
            "message": "" if status == "True" else "Kubelet stopped posting node status.",
            "lastHeartbeatTime": timestamp(), "lastTransitionTime": timestamp(),
        }  # fmt: skip
        room = {"cpu": "64", "memory": "256Gi", "pods": "100", "nvidia.com/gpu": "8"}
        body = {"status": {"conditions": [ready], "capacity": room, "allocatable": room}}
        self.api.patch(f"/api/v1/nodes/{name}/status", body)

    def silence(self, name: str) -> None:
        """Let a kubelet fall silent, and Kubernetes notice it: what its node controller does is done here."""
        self.silent.add(name)
        self.tell_ready(name, "Unknown")
        for pod in self._pods():
            if pod["spec"].get("nodeName") == name:
                ready = [{"type": "Ready", "status": "False", "lastTransitionTime": timestamp()}]
                self._patch_status(pod["metadata"]["name"], {"conditions": ready})

    def wake(self, name: str) -> None:
        self.silent.discard(name)
        self.tell_ready(name)

    def pod_of(self, node: str) -> Manifest | None:
        return next((pod for pod in self._pods() if pod["metadata"]["labels"][NODE_LABEL] == node), None)

    def process_of(self, node: str) -> subprocess.Popen[bytes] | None:
        """The process of a node's pod; None if it has ended."""
        for name, process in list(self.running.items()):
            if name.endswith(f"-{node}") and process.poll() is None:
                return process
        return None

    def kill(self, node: str) -> None:
        """End all processes of a node's pod at once."""
        [name] = [name for name in self.running if name.endswith(f"-{node}")]
        self._kill_pod(name)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for name, process in self.running.items():
            self._kill_pod(name)
            process.kill()  # one that has just begun has no mark in its environment yet
            process.wait()

    # --- what the thread does ----------------------------------------------------------------------------------

    def _play(self) -> None:
        while not self._over.wait(_LOOK_S):
            try:
                self._beat()
                for pod in self._pods():
                    self._attend(pod)
            except (OSError, http.client.HTTPException, ValueError):
                pass  # the API server is away, or somebody was faster: kubelets try again

    def _beat(self) -> None:
        if self.beats and time.monotonic() > self._beat_at + _BEAT_S:
            for name in set(self.names) - self.silent:
                self._patch_machine(name)
            self._beat_at = time.monotonic()

    def _pods(self) -> list[Manifest]:
        pods: list[Manifest] = self.api.ask("GET", f"/api/v1/namespaces/{self.namespace}/pods")["items"]
        return [pod for pod in pods if NODE_LABEL in pod["metadata"].get("labels", {})]

    def _attend(self, pod: Manifest) -> None:
        name, host = pod["metadata"]["name"], pod["spec"].get("nodeName")
        if not host:
            if self._schedules and not self.held:
                self._bind(pod)
            return
        if host in self.silent or host not in self.names:
            return
        process = self.running.get(name)
        if process is None and "deletionTimestamp" not in pod["metadata"]:
            if host in self.imageless:
                self._tell_waiting(pod)
            elif pod["status"].get("phase") == "Pending":
                self._start(pod)
            return
        if "deletionTimestamp" in pod["metadata"] and pod["metadata"]["labels"][NODE_LABEL] in self.stuck:
            return
        if process is None or process.poll() is not None:
            self._kill_pod(name)  # a container ends with its first process
            self._tell_ended(pod, process.returncode if process else 0)
        elif self._told.get(name) not in ("Running", "Ending"):
            self._tell_running(name)
        if "deletionTimestamp" in pod["metadata"]:
            self._end(pod, process)

    def _bind(self, pod: Manifest) -> None:
        taken = [one["spec"].get("nodeName") for one in self._pods()]
        closed = {host for host in self.names if self._is_closed(host)}
        free = [host for host in self.names if host not in _forbidden(pod) | self.silent | closed]
        if not free or len([host for host in taken if host]) >= self.limit:
            why = f"0/{len(self.names)} nodes are available: {len(self.names)} Insufficient nvidia.com/gpu."
            scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
            if pod["status"].get("conditions", [{}])[0].get("message") != why:
                self._patch_status(pod["metadata"]["name"], {"conditions": [scheduled]})
            return
        last = _avoided_if_possible(pod)
        host = min(free, key=lambda one: (one in last, taken.count(one), one))
        name = pod["metadata"]["name"]
        body = {
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": host},
        }  # fmt: skip
        self.api.ask("POST", f"/api/v1/namespaces/{self.namespace}/pods/{name}/binding", body)

    def _is_closed(self, host: str) -> bool:
        """Whether a machine is cordoned, or tainted by us; other taints are for those to heed who remove them."""
        spec = self.api.ask("GET", f"/api/v1/nodes/{host}")["spec"]
        return bool(spec.get("unschedulable")) or any(one["key"] == EVICTED_TAINT for one in spec.get("taints", []))

    def _start(self, pod: Manifest) -> None:
        """Run the pod's command as a process group, with its secrets and folders where only it finds them."""
        name, [own] = pod["metadata"]["name"], pod["spec"]["containers"]
        place = self.folder / name
        paths = {mount["mountPath"]: place / mount["name"] for mount in own.get("volumeMounts", [])}
        for volume in pod["spec"].get("volumes", []):
            (place / volume["name"]).mkdir(parents=True, exist_ok=True)
            if "secret" in volume:
                path = f"/api/v1/namespaces/{self.namespace}/secrets/{volume['secret']['secretName']}"
                for key, value in self.api.ask("GET", path)["data"].items():
                    (place / volume["name"] / key).write_bytes(base64.b64decode(value))

        def here(text: str) -> str:
            for path, folder in paths.items():
                text = text.replace(path, str(folder)) if path != "/dev/shm" else text
            return text

        env = self.env | {_MARK: f"{name}.{self._mark}"}
        for one in own.get("env", []):
            field = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            env[one["name"]] = pod["spec"]["nodeName"] if field else here(one.get("value", ""))
        with (place / "output").open("ab") as output:
            self.running[name] = subprocess.Popen(
                [here(word) for word in own["command"]],
                cwd=own.get("workingDir"), env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self._tell_running(name)

    def _tell_waiting(self, pod: Manifest) -> None:
        """As a kubelet does that tries again and again to pull an image."""
        if not pod["status"].get("containerStatuses"):
            why = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "lab:1"'}
            container = {"name": "holdfast", "ready": False, "restartCount": 0, "image": "lab:1", "imageID": ""}
            statuses = [container | {"state": {"waiting": why}}]
            self._patch_status(pod["metadata"]["name"], {"startTime": timestamp(), "containerStatuses": statuses})

    def _tell_running(self, name: str) -> None:
        container = {"name": "holdfast", "ready": True, "restartCount": 0, "image": "x", "imageID": "x"}
        state = {"running": {"startedAt": timestamp()}}
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": timestamp()}
        self._patch_status(
            name, {"phase": "Running", "startTime": timestamp(), "conditions": [ready],
                   "containerStatuses": [container | {"state": state}]},
        )  # fmt: skip
        self._told[name] = "Running"

    def _tell_ended(self, pod: Manifest, code: int) -> None:
        name = pod["metadata"]["name"]
        if pod["status"].get("phase") in ("Succeeded", "Failed"):
            return
        code = code if code >= 0 else 128 - code
        state = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
        container = {"name": "holdfast", "ready": False, "restartCount": 0, "image": "x", "imageID": "x"}
        phase = "Failed" if code else "Succeeded"
        self._patch_status(name, {"phase": phase, "containerStatuses": [container | {"state": state}]})
        self._told[name] = phase

    def _end(self, pod: Manifest, process: subprocess.Popen[bytes] | None) -> None:
        """Send SIGTERM, and SIGKILL when the grace is over; let the pod go once it has ended."""
        name = pod["metadata"]["name"]
        if process is not None and process.poll() is None:
            if datetime.fromisoformat(pod["metadata"]["deletionTimestamp"]).timestamp() < time.time():
                self._kill_pod(name)
            elif self._told.get(name) != "Ending":
                process.send_signal(signal.SIGTERM)  # a kubelet tells the first process, and leaves the rest to it
                self._told[name] = "Ending"
            return
        shutil.rmtree(self.folder / name / "holdfast-secret", ignore_errors=True)
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        if self.api.ask("GET", path)["status"].get("phase") in ("Succeeded", "Failed"):
            self.api.ask("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0})

    def _kill_pod(self, name: str) -> None:
        word = f"{_MARK}={name}.{self._mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if word in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)

    def _patch_status(self, name: str, status: Manifest) -> None:
        self.api.patch(f"/api/v1/namespaces/{self.namespace}/pods/{name}/status", {"status": status})

    def _retried(self, call: Callable[[], object]) -> None:
        until = time.monotonic() + 20.0
        while True:
            try:
                call()
            except OSError as e:
                if e.errno == 409:
                    return
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
            else:
                return


def _machine(name: str) -> Manifest:
    labels = {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": "z1", "topology.kubernetes.io/rack": "r7"}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": {}}


def _forbidden(pod: Manifest) -> set[str]:
    """The hosts that a pod's affinity forbids."""
    terms = _affinity(pod).get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
    return _excluded(terms)


def _avoided_if_possible(pod: Manifest) -> set[str]:
    """The hosts that a pod gets only if there are no others."""
    wishes = _affinity(pod).get("preferredDuringSchedulingIgnoredDuringExecution", [])
    return _excluded([wish["preference"] for wish in wishes])


def _affinity(pod: Manifest) -> Manifest:
    found: Manifest = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    return found


def _excluded(terms: list[Manifest]) -> set[str]:
    rules = [rule for term in terms for rule in term.get("matchExpressions", [])]
    return {host for rule in rules if rule["operator"] == "NotIn" for host in rule["values"]}
