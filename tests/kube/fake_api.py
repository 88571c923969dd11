"""A small API server for tests: it keeps pods, secrets, leases and nodes, and takes only what current schemas allow."""

import copy
import json
import re
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

Manifest = dict[str, Any]
VERSION = "1.37"
KINDS = {"pods": "Pod", "secrets": "Secret", "leases": "Lease", "nodes": "Node"}
_PATH = re.compile(
    r"/apis?/(?P<api>v1|coordination\.k8s\.io/v1)(/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>pods|secrets|leases|nodes)(/(?P<name>[^/]+))?(/(?P<part>binding|status))?"
)


class ApiFault(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status: Manifest = {
            "kind": "Status", "apiVersion": "v1", "status": "Failure",
            "code": code, "reason": reason, "message": message,
        }  # fmt: skip


class Objects:
    """What the server holds, and every change of it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.held: dict[tuple[str, str], Manifest] = {}
        self.events: list[tuple[int, str, str, Manifest]] = []
        self.version = 1
        self.oldest = 0  # changes before this are forgotten
        self.refusal = ""  # of every pod
        self.forbidden: set[str] = set()  # "get nodes", as a role may lack it
        self.refused = 0  # requests, for lack of a right
        self.token = ""  # that everybody has to show; "": none
        self.odd: dict[str, tuple[int, str, str]] = {}  # "get nodes": a status, a type, "" for none, and a text
        self.broken = False  # it answers nobody
        self.lists = 0  # of pods of one run that were asked for

    def put(self, event: str, plural: str, found: Manifest) -> Manifest:
        with self.changed:
            self.version += 1
            found["metadata"]["resourceVersion"] = str(self.version)
            key = plural, found["metadata"]["name"]
            if event == "DELETED":
                self.held.pop(key, None)
            else:
                self.held[key] = found
            self.events.append((self.version, plural, event, copy.deepcopy(found)))
            self.changed.notify_all()
        return found

    def get(self, plural: str, name: str) -> Manifest:
        if (plural, name) not in self.held:
            raise ApiFault(404, "NotFound", f'{plural} "{name}" not found')
        return copy.deepcopy(self.held[plural, name])

    def create(self, plural: str, namespace: str | None, given: Manifest) -> Manifest:
        try:
            kubernetes_validate.validate(given, VERSION, strict=True)
        except kubernetes_validate.ValidationError as e:
            raise ApiFault(422, "Invalid", f"{KINDS[plural]} is invalid: {e.message}") from None
        meta = given["metadata"]
        if plural == "pods" and self.refusal:
            raise ApiFault(403, "Forbidden", self.refusal)
        if (plural, meta["name"]) in self.held:
            raise ApiFault(409, "AlreadyExists", f'{plural} "{meta["name"]}" already exists')
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
        if namespace:
            meta["namespace"] = namespace
        if plural == "pods":
            given["status"] = {"phase": "Pending"}
        return self.put("ADDED", plural, given)

    def change(self, plural: str, name: str, patch: Manifest) -> Manifest:
        found = self.get(plural, name)
        told = patch.get("metadata", {}).get("resourceVersion")
        if told and told != found["metadata"]["resourceVersion"]:
            raise ApiFault(409, "Conflict", f"{plural} {name} has been modified")
        return self.put("MODIFIED", plural, merged(found, patch))

    def delete(self, plural: str, name: str, grace_s: int | None) -> Manifest:
        found = self.get(plural, name)
        if plural == "pods" and found["spec"].get("nodeName") and grace_s != 0:
            if "deletionTimestamp" not in found["metadata"]:
                wait_s = found["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
                found["metadata"] |= {"deletionTimestamp": timestamp(wait_s), "deletionGracePeriodSeconds": wait_s}
                self.put("MODIFIED", plural, found)
            return found
        return self.put("DELETED", plural, found)

    def list(self, plural: str, labels: dict[str, str]) -> Manifest:
        with self.changed:
            self.lists += bool(labels)
            items = [copy.deepcopy(one) for (kind, _), one in sorted(self.held.items()) if kind == plural]
            return {
                "kind": f"{KINDS[plural]}List",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": str(self.version)},
                "items": [one for one in items if fits(one, labels)],
            }

    def watch(self, plural: str, labels: dict[str, str], version: int) -> Iterator[Manifest]:
        while not self.broken:
            with self.changed:
                if version < self.oldest:
                    gone = ApiFault(410, "Expired", f"too old resource version: {version} ({self.oldest})")
                    yield {"type": "ERROR", "object": gone.status}
                    return
                news = [event for event in self.events if event[0] > version]
                if not news:
                    self.changed.wait(0.1)
                    continue
            version = news[-1][0]
            for _, kind, event, found in news:
                if kind == plural and fits(found, labels):
                    yield {"type": event, "object": found}

    def forget(self) -> None:
        """Forget all changes so far, as etcd does when it compacts; watches that go on from there are refused."""
        with self.changed:
            self.oldest = self.version + 1
            self.events.clear()
            self.version += 1
            self.changed.notify_all()


def timestamp(after_s: float = 0.0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=after_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


def merged(found: Manifest, patch: Manifest) -> Manifest:
    """The merge patch of RFC 7386."""
    whole = dict(found)
    for key, value in patch.items():
        if value is None:
            whole.pop(key, None)
        elif isinstance(value, dict):
            old = whole.get(key)
            whole[key] = merged(old if isinstance(old, dict) else {}, value)
        else:
            whole[key] = value
    return whole


def fits(found: Manifest, labels: dict[str, str]) -> bool:
    own = found["metadata"].get("labels", {})
    return all(own.get(key) == value if value else key in own for key, value in labels.items())


class _Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: Objects

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        url = urlsplit(self.path)
        asked = {key: values[0] for key, values in parse_qs(url.query).items()}
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        found = _PATH.fullmatch(url.path)
        if self.objects.broken:
            self.close_connection = True
            return
        try:
            if self.objects.token and self.headers["Authorization"] != f"Bearer {self.objects.token}":
                raise ApiFault(401, "Unauthorized", "Unauthorized")
            if found is None:
                raise ApiFault(404, "NotFound", f"the server could not find {url.path}")
            verb = {"GET": "get", "POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}[self.command]
            verb = "list" if "labelSelector" in asked else verb
            if f"{verb} {found['plural']}" in self.objects.forbidden:
                self.objects.refused += 1
                raise ApiFault(403, "Forbidden", f'{found["plural"]} is forbidden: User "lab" cannot {verb} it')
            if odd := self.objects.odd.get(f"{verb} {found['plural']}"):
                self._send_text(*odd)
                return
            if asked.get("watch") == "true":
                self._stream(found["plural"], asked)
                return
            self._send(200 if self.command != "POST" else 201, self._do(found, asked, body))
        except ApiFault as e:
            self._send(e.status["code"], e.status)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

    def _do(self, found: re.Match[str], asked: dict[str, str], body: Manifest) -> Manifest:
        plural, name, part = found["plural"], found["name"], found["part"]
        match self.command:
            case "GET":
                return self.objects.get(plural, name) if name else self.objects.list(plural, labels_of(asked))
            case "POST" if part == "binding":
                bound = {"spec": {"nodeName": body["target"]["name"]}}
                return self.objects.change(plural, name, bound)
            case "POST":
                return self.objects.create(plural, found["namespace"], body)
            case "PUT" | "PATCH":
                return self.objects.change(plural, name, body)
        grace = asked.get("gracePeriodSeconds", body.get("gracePeriodSeconds"))
        return self.objects.delete(plural, name, None if grace is None else int(grace))

    def _send(self, code: int, answer: Manifest) -> None:
        self._send_text(code, "application/json", json.dumps(answer))

    def _send_text(self, code: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(code)
        if kind:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, plural: str, asked: dict[str, str]) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        try:
            for event in self.objects.watch(plural, labels_of(asked), int(asked.get("resourceVersion") or 0)):
                self.wfile.write(json.dumps(event).encode() + b"\n")
                self.wfile.flush()
        except OSError:
            pass  # the other side has hung up


def labels_of(asked: dict[str, str]) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in asked.get("labelSelector", "").split(",") if pair)
    return {key: value for key, _, value in pairs}


class FakeApi:
    """The server on a free port of loopback; closed, nothing of it is left."""

    def __init__(self) -> None:
        self.objects = Objects()
        answering = type("Answering", (_Answering,), {"objects": self.objects})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), answering)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def restart(self, down_s: float) -> None:
        """Answer nobody for a while."""
        self.go_away()
        time.sleep(down_s)
        self.come_back()

    def go_away(self) -> None:
        """Answer nobody; what it holds stays, as it does in etcd."""
        self.objects.broken = True
        with self.objects.changed:
            self.objects.changed.notify_all()

    def come_back(self) -> None:
        self.objects.broken = False

    def close(self) -> None:
        self.go_away()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
