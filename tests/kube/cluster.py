"""Clusters for tests: the fake API server, or a real control plane, with machines that the test plays."""

import contextlib
import json
import os
import socket
import subprocess
import urllib.request
import uuid
from pathlib import Path

from lightkube import KubeConfig

from tests.cli.driver import size_of, until
from tests.conftest import MARK
from tests.kube.fake_api import FakeApi
from tests.kube.machines import Api, Machines

BINARIES = Path(os.environ.get("PYTEST_HOLDFAST_KUBE") or "/nonexistent")  # see `make test-kube`
MACHINES = ("gpu-a", "gpu-b", "gpu-c", "gpu-d")
_READY_S = 60.0  # without a word in its log


class Cluster:
    """One namespace of an API server, with machines of its own."""

    def __init__(self, folder: Path, api: Api, kubeconfig: Path, schedules: bool = True) -> None:
        self.namespace = f"t-{uuid.uuid4().hex[:8]}"
        self.api, self.kubeconfig = api, kubeconfig
        folder.mkdir(parents=True, exist_ok=True)
        own = tuple(f"{name}-{self.namespace}" for name in MACHINES)
        self.machines = Machines(api, folder, own, self.namespace, schedules)

    @property
    def config(self) -> KubeConfig:
        return KubeConfig.from_file(str(self.kubeconfig))

    def close(self) -> None:
        self.machines.close()
        with contextlib.suppress(OSError):
            for kind in ("/api/v1", "/apis/coordination.k8s.io/v1"):
                for plural in ("pods", "secrets") if kind == "/api/v1" else ("leases",):
                    self._delete_all(f"{kind}/namespaces/{self.namespace}/{plural}")
            for name in self.machines.names:
                self.api.ask("DELETE", f"/api/v1/nodes/{name}")

    def _delete_all(self, path: str) -> None:
        for found in self.api.ask("GET", path)["items"]:
            with contextlib.suppress(OSError):
                body = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
                self.api.ask("DELETE", f"{path}/{found['metadata']['name']}", body)


class FakeCluster(Cluster):
    def __init__(self, folder: Path) -> None:
        self.fake = FakeApi()
        super().__init__(folder / "machines", Api(self.fake.url), write_kubeconfig(folder, self.fake.url, "none"))

    def close(self) -> None:
        super().close()
        self.fake.close()


class RealCluster(Cluster):
    def __init__(self, folder: Path, plane: "ControlPlane", schedules: bool = True) -> None:
        super().__init__(folder / "machines", plane.api, plane.kubeconfig, schedules)
        self.machines.beats = True
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        plane.api.ask("POST", "/api/v1/namespaces", body)


def write_kubeconfig(folder: Path, url: str, token: str, authority: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    cluster = {"server": url} | ({"certificate-authority": authority} if authority else {})
    path = folder / "kubeconfig"
    content = {
        "apiVersion": "v1", "kind": "Config", "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": cluster}],
        "users": [{"name": "lab", "user": {"token": token}}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
    }  # fmt: skip
    path.write_text(json.dumps(content))
    return path


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago. These servers cannot say which they have found themselves."""
    with contextlib.ExitStack() as open_ones:
        sockets = [open_ones.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


class ControlPlane:
    """A real etcd and a real API server on loopback; the controllers of Kubernetes too, if asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._etcd_port, peer, self._port = free_ports(3)
        self.token = uuid.uuid4().hex
        self._tokens = folder / "tokens.csv"
        self._tokens.write_text(f'{self.token},admin,1,"system:masters"\n')
        subprocess.run(["openssl", "genrsa", "-out", str(folder / "sa.key"), "2048"], check=True, capture_output=True)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        own, other = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{peer}"
        self._start(
            "etcd", f"--data-dir={folder}/etcd", f"--listen-client-urls={own}", f"--advertise-client-urls={own}",
            f"--listen-peer-urls={other}", f"--initial-advertise-peer-urls={other}",
            f"--initial-cluster=default={other}",
        )  # fmt: skip
        try:
            self.start_api()
        except BaseException:
            self.close()
            raise
        self.authority = str(folder / "certs" / "apiserver.crt")
        self.url = f"https://127.0.0.1:{self._port}"
        self.api = Api(self.url, self.token, self.authority)
        self.kubeconfig = write_kubeconfig(folder, self.url, self.token, self.authority)

    def start_api(self) -> None:
        self._start(
            "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{self._etcd_port}", "--bind-address=127.0.0.1",
            f"--secure-port={self._port}", f"--cert-dir={self._folder}/certs",
            "--service-cluster-ip-range=10.96.0.0/24", "--endpoint-reconciler-type=none",
            "--advertise-address=127.0.0.1",
            f"--service-account-key-file={self._folder}/sa.key",
            f"--service-account-signing-key-file={self._folder}/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc", f"--token-auth-file={self._tokens}",
            "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount",
        )  # fmt: skip
        log, process = self._folder / "kube-apiserver.log", self._processes["kube-apiserver"]
        until(lambda: self._is_ready() or process.poll() is not None, "an API server", _READY_S, lambda: size_of(log))
        assert process.poll() is None, f"the API server has ended: {log.read_text()[-2000:]}"

    def add_user(self, name: str) -> str:
        """Make somebody who may do nothing yet, and return the token; the API server reads it as it starts."""
        token = uuid.uuid4().hex
        with self._tokens.open("a") as file:
            file.write(f"{token},{name},{name}\n")
        self.crash_api()
        self.start_api()
        return token

    def crash_api(self) -> None:
        self._processes["kube-apiserver"].kill()
        self._stop("kube-apiserver")

    def start_controllers(self) -> None:
        """Start Kubernetes' own controllers of nodes, pods and garbage, and its scheduler, unless they run."""
        if "kube-scheduler" in self._processes:
            return
        self._start(
            "kube-controller-manager", f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--port=0",
            "--secure-port=0", "--controllers=nodelifecycle,podgc,namespace,garbagecollector,deployment,replicaset",
            "--node-monitor-grace-period=6s", "--node-monitor-period=1s",
            f"--service-account-private-key-file={self._folder}/sa.key",
        )  # fmt: skip
        self._start(
            "kube-scheduler", f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--port=0", "--secure-port=0"
        )

    def compact(self) -> None:
        """Have etcd forget all changes so far."""

        def ask(path: str, body: dict[str, object]) -> dict[str, object]:
            request = urllib.request.Request(f"http://127.0.0.1:{self._etcd_port}/v3/{path}", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=20) as answer:
                found: dict[str, object] = json.load(answer)
                return found

        header = ask("kv/range", {"key": "AA=="})["header"]
        assert isinstance(header, dict)
        ask("kv/compaction", {"revision": header["revision"], "physical": True})

    def close(self) -> None:
        for name in reversed(list(self._processes)):
            self._stop(name)

    def _start(self, name: str, *flags: str) -> None:
        env = {key: value for key, value in os.environ.items() if key != MARK}  # it serves several tests
        env |= {"ETCD_UNSUPPORTED_ARCH": "arm64"} if os.uname().machine == "aarch64" else {}
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(BINARIES / name), *flags], cwd=self._folder, env=env, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    def _stop(self, name: str) -> None:
        process = self._processes.pop(name)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _is_ready(self) -> bool:
        authority = self._folder / "certs" / "apiserver.crt"
        if not authority.exists():
            return False
        try:
            Api(f"https://127.0.0.1:{self._port}", self.token, str(authority)).ask("GET", "/api/v1/namespaces/default")
        except (OSError, ValueError):
            return False
        return True
