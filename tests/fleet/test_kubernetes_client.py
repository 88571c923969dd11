"""Requests to an API server: credentials that cannot be used or expire, and answers that are none of Kubernetes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from lightkube import KubeConfig

from holdfast.fleet.kubernetes_client import KubernetesClient, KubernetesError, default_namespace, read_config
from holdfast.fleet.kubernetes_lease import KubernetesLease
from holdfast.journal.lease_term import no_lease
from tests.kube.fake_api import FakeApi

pytestmark = pytest.mark.timeout(120)

CONTEXT = "contexts: [{name: a, context: {cluster: a, user: a}}]\ncurrent-context: a\n"
SERVER = "'https://127.0.0.1:1'"


@pytest.mark.parametrize(
    ("kubeconfig", "told"),
    [
        ("", "the kubeconfig is empty"),
        ("- a\n", "no mapping with clusters"),
        ("clusters: null\ncontexts: null\nusers: null\n", "no mapping with clusters"),
        ("a: [", "cannot be read: while parsing"),
        ("\0", "cannot be read: unacceptable character"),
        ("kind: Config\n", "lacks 'clusters'"),
        ("clusters: []\ncontexts: []\nusers: []\n", "No current context"),
        ("clusters: []\ncontexts: []\nusers: []\ncurrent-context: a\n", "Context 'a' not found"),
        (f"clusters: []\nusers: []\n{CONTEXT}", "lacks 'a'"),
        ("clusters: [{name: a, cluster: {server: [1]}}]\n" + CONTEXT, "cannot be read: Expected `str`"),
        (
            f"clusters: [{{name: a, cluster: {{server: {SERVER}}}}}]\n{CONTEXT.replace(', user: a', '')}",
            "names no user",
        ),
        (
            f"clusters: [{{name: a, cluster: {{server: {SERVER}, certificate-authority: ca.crt}}}}]\n"
            f"users: [{{name: a, user: {{token: x}}}}]\n{CONTEXT}",
            "there is no ca.crt, which the kubeconfig names",
        ),
        (
            f"clusters: [{{name: a, cluster: {{server: {SERVER}, certificate-authority-data: abc}}}}]\n"
            f"users: [{{name: a, user: {{token: x}}}}]\n{CONTEXT}",
            "cannot be read: ",
        ),
        (
            f"clusters: [{{name: a, cluster: {{server: {SERVER}}}}}]\n"
            "users: [{name: a, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: x}}}]\n" + CONTEXT,
            "plugin speaks client.authentication.k8s.io/v1;",
        ),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_told_in_one_sentence(
    kubeconfig: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kubeconfig").write_text(kubeconfig)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with pytest.raises(KubernetesError) as raised:
        read_config()
    assert told in str(raised.value) and "\n" not in str(raised.value) and raised.value.status == 0


def test_a_kubeconfig_of_todays_clouds_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their commands write plugins of this version."""
    (tmp_path / "kubeconfig").write_text(
        f"clusters: [{{name: a, cluster: {{server: {SERVER}}}}}]\n"
        "users: [{name: a, user: {exec: {apiVersion: client.authentication.k8s.io/v1beta1, command: x}}}]\n" + CONTEXT
    )
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    assert default_namespace(read_config()) == "default"


@pytest.fixture
def api() -> Iterator[FakeApi]:
    api = FakeApi()
    yield api
    api.close()


def client_of(api: FakeApi, folder: Path, user: str) -> KubernetesClient:
    """A client whose kubeconfig has these words about its user."""
    path = folder / "kubeconfig"
    path.write_text(
        f"clusters: [{{name: a, cluster: {{server: '{api.url}'}}}}]\nusers: [{{name: a, user: {{{user}}}}}]\n{CONTEXT}"
    )
    return KubernetesClient(KubeConfig.from_file(str(path)), "ml", no_lease)


async def test_a_token_that_expired_is_read_anew(api: FakeApi, tmp_path: Path) -> None:
    """A kubelet replaces the token of a service account every hour, in the file that the client read it from."""
    token = tmp_path / "token"
    token.write_text("first")
    api.objects.token = "first"
    client = client_of(api, tmp_path, f"tokenFile: {token}")
    lease = KubernetesLease(client, "gpt", "a", tmp_path / "lease", print)
    await lease.take()
    api.objects.token = "second"
    with pytest.raises(KubernetesError, match="Unauthorized") as raised:
        await client.list_pods("gpt")
    assert raised.value.status == 401, "not yet replaced"
    token.write_text("second")
    assert (await client.list_pods("gpt"))[0] == []
    await lease.take()
    changes = client.watch_pods("gpt", str(api.objects.version))
    api.objects.token = "third"
    token.write_text("third")
    api.objects.create("pods", "ml", pod())
    assert (await anext(changes))[0].metadata.name == "gpt-n0", "a watch begins with the new one, too"
    await lease.let_go()


def pod() -> dict[str, object]:
    labels = {"holdfast.dev/run": "gpt", "holdfast.dev/node": "n0"}
    spec = {"containers": [{"name": "holdfast", "image": "lab:1"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "gpt-n0", "labels": labels}, "spec": spec}


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (503, "", "no server is available"),
        (502, "text/html", "<html>bad gateway</html>"),
        (503, "application/json", "<html>"),
        (200, "text/html", "<html>please log in</html>"),
        (200, "application/json", '{"items": [{"metadata": {"name": 7}}]}'),
        (200, "application/json", '{"kind": "Pod", "metad'),
    ],
)
async def test_what_a_proxy_answers_for_an_api_server_is_a_failure_of_one_request(
    api: FakeApi, tmp_path: Path, status: int, kind: str, text: str
) -> None:
    client = client_of(api, tmp_path, "token: x")
    for verb in ("get pods", "list pods"):
        api.objects.odd[verb] = status, kind, text
    for ask in (lambda: client.list_pods("gpt"), lambda: client.find_pod("gpt-n0"), lambda: watch_once(client)):
        with pytest.raises(KubernetesError) as raised:
            await ask()
        assert "Kubernetes" in str(raised.value) and "\n" not in str(raised.value)
    api.objects.odd.clear()
    assert (await client.list_pods("gpt"))[0] == []
    await client.close()


async def watch_once(client: KubernetesClient) -> None:
    async for _ in client.watch_pods("gpt", "1"):
        break


async def test_a_plugin_that_gives_no_token_is_a_failure_of_one_request(api: FakeApi, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    plugin.write_text('#!/bin/sh\ncat "$0.says"\n')
    plugin.chmod(0o755)
    api.objects.token = "good"
    client = client_of(
        api, tmp_path, f"exec: {{apiVersion: client.authentication.k8s.io/v1beta1, command: '{plugin}', args: []}}"
    )
    says = tmp_path / "plugin.says"
    for word, told in (("oops", "not understood"), ('{"status": {}}', "lacks 'token'")):
        says.write_text(word)
        with pytest.raises(KubernetesError, match=told):
            await client.list_pods("gpt")
    says.write_text('{"status": {"token": "good"}}')
    assert (await client.list_pods("gpt"))[0] == []
    await client.close()
