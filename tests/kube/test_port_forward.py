"""A laptop looks at a job in a cluster: `kubectl port-forward` by a real API server, to a kubelet that is played."""

import contextlib
import http.client
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from holdfast.cli.run_dirs import run_dir_secrets
from holdfast.wire.credentials.certificate_authority import CertificateAuthority
from holdfast.wire.run_and_node_specs import ControllerAddress, read_json
from tests.cli.conftest import Start
from tests.cli.conftest import start as start
from tests.cli.driver import Job, run_command, until
from tests.cli.page_in_browser import serving
from tests.kube.cluster import BINARIES, RealCluster
from tests.kube.fake_api import timestamp
from tests.kube.kubelet_port import KubeletPort
from tests.kube.test_real_cluster import PATIENCE_S, kubectl
from tests.kube.test_real_cluster import cluster as cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
POD, PORT = "holdfast-7c9d-x2x", 29400  # of a controller, as the base names its port
WAITS = "holdfast-7c9d-a1a"
LABELS = {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/component": "controller"}


def deploy_controller(cluster: RealCluster, kubelet: KubeletPort) -> None:
    """The deployment that `kubectl port-forward deploy/holdfast` looks up, with two pods that a machine runs."""
    containers = [{"name": "controller", "image": "lab:1"}]
    template = {"metadata": {"labels": LABELS}, "spec": {"containers": containers}}
    machine = cluster.machines.names[0]
    # Paused: what Kubernetes' own controllers would make of it has no part in this.
    spec = {"replicas": 1, "paused": True, "selector": {"matchLabels": LABELS}, "template": template}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "holdfast"}, "spec": spec}
    kubectl(cluster, "create", "-f", "-", text=json.dumps(deployment))
    for name, ready in (WAITS, False), (POD, True):  # as with a journal in Postgres: the second one only waits
        pod = {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": LABELS},
            "spec": {"nodeName": machine, "containers": containers},
        }  # fmt: skip
        kubectl(cluster, "create", "-f", "-", text=json.dumps(pod))
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": timestamp()}
        container = {"name": "controller", "ready": ready, "restartCount": 0, "image": "x", "imageID": "x"}
        state = {"running": {"startedAt": timestamp()}}
        status = {"phase": "Running", "conditions": [condition], "containerStatuses": [container | {"state": state}]}
        cluster.api.patch(f"/api/v1/namespaces/{cluster.namespace}/pods/{name}/status", {"status": status})
    reached = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet.port}},
    }
    cluster.api.patch(f"/api/v1/nodes/{machine}/status", {"status": reached})


@pytest.fixture
def job(start: Start, cluster: RealCluster) -> Job:
    flags = ("--fleet", "kubernetes", "--kube-image", "lab:1", "--kube-namespace", cluster.namespace)
    job = start(
        *flags, "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "gpt", "--nnodes", "1",
        KUBECONFIG=str(cluster.kubeconfig),
    )  # fmt: skip
    job.patience_s = PATIENCE_S
    job.trains(1)
    return job


@pytest.fixture
def kubelet(job: Job, cluster: RealCluster, tmp_path: Path) -> Iterator[KubeletPort]:
    port = urlsplit(read_json(job.run_dir / "controller.json", ControllerAddress).url).port
    assert port is not None
    kubelet = KubeletPort(tmp_path, {(cluster.namespace, POD, PORT): port})
    deploy_controller(cluster, kubelet)
    yield kubelet
    kubelet.close()


def programs() -> list[str]:
    """Debian's kubectl, which asks for SPDY, and the one of this host, which may ask for WebSockets first."""
    own = str(BINARIES / "kubectl")
    return [own, *({shutil.which("kubectl") or own} - {own})]


@contextlib.contextmanager
def forwarding(program: str, cluster: RealCluster, folder: Path) -> Iterator[str]:
    """The address at which kubectl offers the controller's port."""
    argv = [program, f"--kubeconfig={cluster.kubeconfig}", f"--namespace={cluster.namespace}"]
    said = folder / "forward.log"
    with said.open("wb") as out:
        forward = subprocess.Popen([*argv, "port-forward", "deploy/holdfast", f":{PORT}"], stdout=out, stderr=out)
    try:
        line = until(lambda: next((one for one in said.read_text().splitlines() if "127.0.0.1:" in one), ""), "a port")
        yield f"https://localhost:{line.split('127.0.0.1:')[1].split()[0]}"
    finally:
        forward.terminate()
        forward.wait(20)


def test_a_laptop_asks_a_controller_through_a_forwarded_port(
    job: Job, kubelet: KubeletPort, cluster: RealCluster, tmp_path: Path
) -> None:
    token, door = tmp_path / "token", run_dir_secrets.door_keys_folder(job.run_dir) / "authority.pem"
    stranger = CertificateAuthority(tmp_path / "stranger").keys.authority
    for program in programs():
        token.write_text(run_dir_secrets.read_token(job.run_dir))
        with forwarding(program, cluster, tmp_path) as address:
            words = ("status", address, "--token-file", str(token), "--cacert")
            told = run_command(*words, str(door), "--json", folder=tmp_path)
            assert told.returncode == 0, (program, told.stderr)
            status = json.loads(told.stdout)
            assert (status["run_id"], status["phase"], len(status["nodes"])) == ("gpt", "training", 1)
            assert kubelet.asked[-1] == f"/portForward/{cluster.namespace}/{POD}"
            shown = run_command(*words, str(door), folder=tmp_path)
            assert shown.returncode == 0 and "generation 1" in shown.stdout
            assert run_command(*words, str(stranger), folder=tmp_path).returncode == 1, "who answers is somebody else"
            token.write_text("guess")
            refused = run_command(*words, str(door), folder=tmp_path)
            assert refused.returncode == 1 and "X-Holdfast-Token" in refused.stderr
    job.finish()
    job.ends(0)


class Page:
    """What a browser asks of the page that `holdfast dash` serves."""

    def __init__(self, address: str) -> None:
        place = urlsplit(address)
        self._host, self._key = place.netloc, ""
        self._key = json.loads(self.ask("/enter", {"code": parse_qs(place.query)["code"][0]}))["key"]

    def ask(self, path: str, body: dict[str, str] | None = None) -> bytes:
        """Send a GET, or a POST if there is a body; return what is answered."""
        with self.open(path, body) as answer:
            return answer.read()

    @contextlib.contextmanager
    def open(self, path: str, body: dict[str, str] | None = None) -> Iterator[http.client.HTTPResponse]:
        headers = {"X-Holdfast-Page": self._key, "Origin": f"http://{self._host}"}
        link = http.client.HTTPConnection(self._host, timeout=PATIENCE_S)
        with contextlib.closing(link):
            link.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
            with link.getresponse() as answer:
                assert answer.status == http.HTTPStatus.OK, (path, answer.status, answer.read())
                yield answer


def test_a_laptop_follows_a_job_on_a_page_and_gives_an_order_through_a_forwarded_port(
    job: Job, kubelet: KubeletPort, cluster: RealCluster, tmp_path: Path
) -> None:
    token, door = tmp_path / "token", run_dir_secrets.door_keys_folder(job.run_dir) / "authority.pem"
    token.write_text(run_dir_secrets.read_token(job.run_dir))
    with forwarding(programs()[0], cluster, tmp_path) as address:
        words = (address, "--token-file", str(token), "--cacert", str(door))
        with serving(*words, said=tmp_path / "dash.stderr") as page_address:
            page = Page(page_address)
            assert b'"gpt"' in page.ask("/view")
            with page.open("/live?after=0") as live:
                assert live.readline(), "the first line says where to begin"
                page.ask("/order", {"verb": "hold"})
                job.until(lambda: job.phase() == "held", "the order's end")
                until(lambda: b"held" in live.readline(), "a word of it on the page")
                page.ask("/order", {"verb": "resume"})
                job.trains(2)
    assert set(kubelet.asked) == {f"/portForward/{cluster.namespace}/{POD}"}
    job.finish()
    job.ends(0)
