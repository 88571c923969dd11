"""The controller's port and its links to agents: whatever is said there, it answers, and goes on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import WSMessage, WSMsgType
from aiohttp.test_utils import TestServer
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.config import Settings
from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.caller_admission import Caller
from holdfast.controller.access.enrolment_token_api import MintBody, TokenMinting
from holdfast.controller.access.enrolment_tokens import NodeTokens
from holdfast.controller.access.link_opener import LinkOpener
from holdfast.controller.access.node_enrolment import NodeEnrolment
from holdfast.controller.api import ApiEntrance, make_api, status_of
from holdfast.controller.api_description import TraceBody, describe_api
from holdfast.controller.composition import BuiltController
from holdfast.controller.order_admission import VERBS, OrderBody
from holdfast.core.agent_state_machine import Post
from holdfast.core.record.job_report import report_of
from holdfast.model.job_and_seats import Job
from holdfast.model.observation import Beat
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import Hello
from holdfast.wire.credentials.certificate_authority import CertificateAuthority
from holdfast.wire.credentials.enrolment import EnrolmentRequest
from tests.controller.conftest import RELEASE, TOKEN, admit, make
from tests.controller.fakes import FakeFleet
from tests.fuzz.making import FLOATS, INTS, JSON, PLAIN, Given, hostile, mutated, values

JOB = Job(run_id="r", min_nodes=2, max_nodes=2, standbys=1, can_acquire=False)
_NODES = st.sampled_from(("a", "b", "c"))
_SMALL = st.one_of(st.integers(-1, 3), INTS)
_GIVEN = {**PLAIN, str: st.one_of(_NODES, PLAIN[str]), int: _SMALL, float: st.one_of(st.floats(0, 3), FLOATS)}


class Wire:
    """A controller's end of a link: it hears these packets, and what it says is dropped."""

    def __init__(self, packets: list[bytes]) -> None:
        self.packets = packets
        self.closed = 0

    async def __aiter__(self) -> AsyncIterator[WSMessage]:
        for packet in self.packets:
            yield WSMessage(WSMsgType.BINARY, packet, None)
            await asyncio.sleep(0)

    async def send_bytes(self, data: bytes) -> None:
        agent_messages.decode_from_controller(data)

    async def close(self, *, code: int = 1000, message: bytes = b"") -> bool:
        self.closed = code
        return True


@contextlib.asynccontextmanager
async def _running(folder: Path, job: Job = JOB) -> AsyncIterator[BuiltController]:
    (folder / "journal.db").unlink(missing_ok=True)
    built = make(folder, Settings(), FakeFleet(can_acquire=job.can_acquire))
    running = asyncio.create_task(built.controller.run(job, RELEASE))
    await asyncio.sleep(0)
    yield built
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    built.controller.journal.close()


def _trained(node: str, order: int) -> list[bytes]:
    """How a node of the first generation begins."""
    said = [Hello(node=node, host="h", nproc=2, order=order, generation=0, ready=True)]
    return [agent_messages.encode(one) for one in said]


def _said_by(node: str, kind: Any = agent_messages.FromAgent) -> st.SearchStrategy[tuple[str, Any]]:
    """Mostly of itself and of a generation that there is, so that it counts."""
    near: Given = {**_GIVEN, str: st.one_of(st.just(node), st.just(node), _NODES, PLAIN[str])}
    near |= {int: st.one_of(st.integers(0, 3), st.just(1), _SMALL)}
    return st.tuples(st.just(node), values(kind, near))


_KINDS = (agent_messages.FromAgent, Beat, Post, Hello, agent_messages.HashReport)
_SAID = st.one_of(*(_said_by(node, kind) for node in "abc" for kind in _KINDS))


async def _heard(folder: Path, said: list[tuple[str, Any]]) -> None:
    async with _running(folder) as built:
        controller, ingest = built.controller, built.ingest
        links = {node: ingest.links.make_outbox() for node in "abc"}
        for order, node in enumerate("ab"):
            for packet in _trained(node, order):
                ingest._on_message(agent_messages.decode_from_agent(packet), links[node], "")
        await _settled()
        for id in range(1, 9):  # whatever was asked is done
            for node in "ab":
                done = agent_messages.decode_from_agent(agent_messages.encode(_done(id, node)))
                ingest._on_message(done, links[node], node)
        await _settled()
        for node in "ab":
            ingest._on_message(Beat(node=node, generation=1, step=1, at=1.0, first_step=1), links[node], node)
        for node, message in said:
            packet = agent_messages.encode(message)
            await ingest.attend_link(Wire([*_trained(node, 0), packet]), LinkOpener(Caller(name=node, node=node)))
            await _settled()
            controller.check_nodes()
        assert not controller._stepping
        msgspec.json.encode(status_of(controller))
        msgspec.json.encode(report_of(controller.ledger.make_account(controller.clock())))


def _done(id: int, node: str) -> Post:
    from holdfast.model.node_errands import Done

    return Post(seq=id, body=Done(id=id, node=node, ok=True))


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@given(said=st.lists(_SAID, min_size=1, max_size=8))
def test_anything_that_a_node_may_say(said: list[tuple[str, Any]], tmp_path: Path) -> None:
    asyncio.run(_heard(tmp_path, said))


@given(
    packets=st.lists(
        st.one_of(st.binary(max_size=64), mutated(_SAID.map(lambda one: agent_messages.encode(one[1])))), max_size=4
    )
)
@example(packets=[b"\x82\xa4type\xa6notice\xa4node\xa2\xff\xff"])
@example(packets=[b"\x81\xa1x" + b"\x91" * 9_000])
def test_any_bytes_on_a_link(packets: list[bytes], tmp_path: Path) -> None:
    async def heard() -> None:
        async with _running(tmp_path) as built:
            await built.ingest.attend_link(Wire(packets), LinkOpener())
            await _settled()
            assert not built.controller._stepping

    asyncio.run(heard())


# --- the port ----------------------------------------------------------------------------------------------------

_ARCHIVES = ("releases/" + "0" * 64, "releases/..%2f..")
_NAMES = (
    "status",
    "report",
    "entries",
    "orders",
    "orders/preview",
    "releases",
    "trace",
    "node-tokens",
    "ranks/0",
    *_ARCHIVES,
)
_COMPILED = "/api/v1/releases/compiled"
_PATHS = (*(f"/api/v1/{name}" for name in _NAMES), _COMPILED, "/metrics", "/openapi.json", "/agent", "/enrol")
_DESCRIBED = describe_api()["paths"]
_METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW")
_AFTER = ("0", "-1", "1e3", "9" * 400, "-" + "9" * 400, "9" * 5000, "%ff", "%D9%A3")
_NONCES = ("%ff", "a" * 64, "%ff" * 64)
_QUERIES = st.sampled_from(
    ("", "?a&a&=&%", *(f"?after={n}" for n in _AFTER), *(f"?nonce={n}&token=%ff" for n in _NONCES))
)
_BODIES = st.one_of(
    st.binary(max_size=40),
    hostile(values(OrderBody, {**JSON, str: st.sampled_from((*VERBS, "a", ""))}).map(msgspec.json.encode)),
    hostile(values(TraceBody, JSON).map(msgspec.json.encode)),
    hostile(values(MintBody, JSON).map(msgspec.json.encode)),
    hostile(values(EnrolmentRequest, JSON).map(msgspec.json.encode)),
)
_HEADERS = st.lists(
    st.sampled_from(
        (
            b"Host: [",
            b"Host: [::1",
            b"Host: \xff",
            b"Host: a:b:c",
            b"Origin: http://[",
            b"Origin: \xff\xfe",
            b"X-Holdfast-Token: \xff\xfe",
            b"X-Holdfast-Token: ",
            b"Authorization: Bearer \xc3\xa9",
            b"Content-Type: \xff; charset=\xff",
            b"Content-Encoding: gzip",
            b"Range: bytes=-9",
            b"If-Modified-Since: \xff",
            b"Upgrade: websocket",
            b"Connection: upgrade",
            b"Sec-WebSocket-Key: \xff",
            b"Sec-WebSocket-Version: 13",
            b"Expect: 100-continue",
            b"Cookie: \xff=\xff",
        )
    ),
    max_size=3,
)


class Port:
    """A controller that listens, and whoever calls it byte by byte."""

    def __init__(self, folder: Path) -> None:
        self.runner = asyncio.Runner()
        self._open = contextlib.AsyncExitStack()
        self.runner.run(self._start(folder))

    async def _start(self, folder: Path) -> None:
        built = await self._open.enter_async_context(_running(folder))
        self.controller = built.controller
        authority, audit = CertificateAuthority(folder / "door"), AuditLog(folder)
        tokens = NodeTokens(folder / "door", lambda: None)
        enrolling = NodeEnrolment(
            authority,
            TOKEN,
            "r",
            audit=audit,
            tokens=tokens,
            certificates=built.certificates,
            admission=built.ingest.admission,
            announce=built.controller.process_event,
        )
        door = ApiEntrance(admit, audit, enrolling, minting=TokenMinting(audit, tokens))
        self.server = TestServer(make_api(built, door))
        await self._open.enter_async_context(self.server)

    def close(self) -> None:
        self.runner.run(self._open.aclose())
        self.runner.close()

    async def call(self, request: bytes, patience_s: float = 30.0) -> int:
        """The status of the answer; 0: there was none."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            writer.write(request)
            async with asyncio.timeout(patience_s):
                line = await reader.readline()
            return int(line.split()[1]) if line else 0
        except (ConnectionError, TimeoutError):
            return 0
        finally:
            writer.close()


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    found = Port(tmp_path)
    yield found
    found.close()


@given(
    target=st.tuples(st.sampled_from(_PATHS), _QUERIES).map("".join),
    method=st.sampled_from(_METHODS),
    headers=_HEADERS,
    body=_BODIES,
)
@example(target="/api/v1/entries?after=" + "9" * 400, method="GET", headers=[], body=b"")
@example(target="/api/v1/status", method="GET", headers=[b"Host: ["], body=b"")
@example(target="/api/v1/status", method="GET", headers=[b"Origin: http://["], body=b"")
@example(target="/api/v1/status", method="GET", headers=[b"Host: \xff"], body=b"")
@example(target="/api/v1/orders", method="POST", headers=[], body=b'{"verb":"\xff"}')
@example(target="/api/v1/orders", method="POST", headers=[], body=b'{"verb":' + b"[" * 9_000)
@example(target="/api/v1/trace", method="POST", headers=[], body=b'{"deadline_s":1e999}')
@example(target="/enrol?nonce=" + "%ff" * 64, method="GET", headers=[], body=b"")
@example(target="/enrol", method="POST", headers=[], body=b'{"name":"\xff"}')
@example(target="/api/v1/orders", method="POST", headers=[b"Content-Encoding: gzip"], body=b"{}")
@example(target="/agent", method="GET", headers=[b"Upgrade: websocket", b"Connection: upgrade"], body=b"")
def test_any_request(target: str, method: str, headers: list[bytes], body: bytes, port: Port) -> None:
    """Never an error of ours (5xx), and the next request is answered."""
    body = body.replace(b'"deadline_s":5', b'"deadline_s":0')  # nobody waits that long here
    named = [] if any(header.startswith(b"Host") for header in headers) else [b"Host: localhost"]
    shown = [] if any(header.startswith((b"X-Hold", b"Auth")) for header in headers) else [_TOKEN]
    head = [f"{method} {target} HTTP/1.1".encode(), *named, *shown, *headers]
    head += [b"Content-Length: %d" % len(body), b"Connection: close"]
    code = port.runner.run(port.call(b"\r\n".join(head) + b"\r\n\r\n" + body))
    assert code < 500, f"{code} for {head[0]!r}"
    path = target.partition("?")[0].replace("0" * 64, "{digest}")
    if documented := _DESCRIBED.get(path, {}).get(method.lower()):
        assert str(code) in (*documented["responses"], "0", "100"), f"{code} of {head[0]!r} is not in the description"
    assert not port.controller._stepping
    assert port.runner.run(port.call(_GOOD)) == 200


def test_every_route_is_among_them(port: Port) -> None:
    routes = {resource.canonical for resource in port.server.app.router.resources()}
    routes = {route.replace("{digest}", "0" * 64).replace("{rank}", "0") for route in routes}
    assert routes <= {*_PATHS}, "a new route gets its line in _PATHS"


_WAITS_S = 0.2  # for a request that may be waiting for the rest of itself
_TOKEN = f"{agent_messages.TOKEN_HEADER}: {TOKEN}".encode()
_GOOD = b"\r\n".join([b"GET /api/v1/status HTTP/1.1", b"Host: localhost", _TOKEN, b"", b""])


_UNREADABLE_HOST = b"GET /api/v1/status HTTP/1.1\r\nHost: localhos>\x96\x838\xbat\r\nContent-Length: 3\r\n\r\nabc"


@example(request=_UNREADABLE_HOST)
@given(request=hostile(st.just(b"GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc")))
def test_any_bytes_at_the_port(request: bytes, port: Port) -> None:
    code = port.runner.run(port.call(request + b"\r\n\r\n", _WAITS_S))
    assert code < 500 or code == 505  # of another HTTP
    assert port.runner.run(port.call(_GOOD)) == 200
