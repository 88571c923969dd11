"""The controller's port as strangers find it: real sockets, with TLS and without."""

import asyncio
import contextlib
import gc
import logging
import socket
import ssl
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp.http_exceptions import BadStatusLine

from holdfast.cli.launch.controller_log import ControllerLog
from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.caller_admission import PortAccess
from holdfast.controller.access.connection_gate import ConnectionGate
from holdfast.controller.access.enrolment_tokens import NodeTokens
from holdfast.controller.access.log_flood_filter import ServerLogFilter
from holdfast.controller.access.node_enrolment import NodeEnrolment
from holdfast.controller.api import ApiEntrance, make_api, make_runner
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.credentials.certificate_authority import CertificateAuthority
from tests.controller.conftest import Open

LINKS = 40


@contextlib.asynccontextmanager
async def _port(desk_of: Open, folder: Path, locked: bool) -> AsyncIterator[socket.socket]:
    async with desk_of() as desk:
        authority = CertificateAuthority(folder / "door")
        tls = mutual_tls.server_tls(authority.keys, strangers=True) if locked else None
        porch = ConnectionGate(lambda: runner.server(), tls)  # type: ignore[misc]
        audit = AuditLog(folder)
        enrolling = NodeEnrolment(
            authority,
            "t",
            "r",
            audit=audit,
            tokens=NodeTokens(folder / "door", lambda: None),
            certificates=desk.built.certificates,
            admission=desk.built.ingest.admission,
            announce=desk.controller.process_event,
        )
        door = ApiEntrance(PortAccess(lambda: (), "localhost"), audit, enrolling, porch.note_proved)
        runner = make_runner(make_api(desk.built, door))
        await runner.setup()
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            receiving = asyncio.create_task(porch.run(listener))
            yield listener
            receiving.cancel()
            await asyncio.wait([receiving])
        await runner.cleanup()


_STATUS = b"GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n"


def _asked(address: tuple[str, int], request: bytes, proof: ssl.SSLContext | None = None) -> bytes:
    """The first line of the answer."""
    with contextlib.ExitStack() as stack:
        link: socket.socket = stack.enter_context(socket.create_connection(address, timeout=30))
        if proof:
            link = stack.enter_context(proof.wrap_socket(link))
        link.sendall(request)
        with contextlib.suppress(OSError):
            return link.recv(4096).partition(b"\r\n")[0]
    return b""


_BAD = (
    b"POST /enrol HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\nnot gzip!",
    b"POST /enrol HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/9\r\n\r\n",
    b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n",
)


async def test_bad_requests_do_not_fill_the_log(desk_of: Open, tmp_path: Path) -> None:
    """Anybody can send these, and as many as they like."""
    log, root = ControllerLog(tmp_path), logging.getLogger()  # open_log is for processes of its own
    log.addFilter(ServerLogFilter())
    root.addHandler(log)
    try:
        async with _port(desk_of, tmp_path, locked=False) as listener:
            for number in range(200):
                status = await asyncio.to_thread(_asked, listener.getsockname(), _BAD[number % len(_BAD)])
                assert b" 40" in status or b" 505 " in status, status
    finally:
        root.removeHandler(log)
        log.close()
    written = (tmp_path / "controller.log").read_text()
    assert len(written) < 4000
    assert "Traceback" not in written and "BadHttpMessage" in written


def _complaint(error: Exception) -> logging.LogRecord:
    found = (type(error), error, None)
    return logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "Error handling request from %s", ("h",), found)


def test_complaints_are_one_a_second_and_bugs_keep_their_traceback() -> None:
    clock = [10.0]
    brief = ServerLogFilter(lambda: clock[0])
    assert [brief.filter(_complaint(BadStatusLine("x\ny" * 999))) for _ in range(3)] == [True, False, False]
    clock[0] += 1.0
    bad = _complaint(BadStatusLine("x\ny" * 999))
    assert brief.filter(bad) and not bad.exc_info
    said = bad.getMessage()
    assert said.startswith("Error handling request from h: BadStatusLine: 400") and "\n" not in said
    assert said.endswith("(2 more were not written)") and len(said) < 250
    clock[0] += 1.0
    assert brief.filter(cut := _complaint(BadStatusLine(f"{'x ' * 55}ghp_aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY")))
    assert "ghp_" not in cut.getMessage(), "where it was cut, the log could not tell that it is a token"
    clock[0] += 1.0
    bug = _complaint(KeyError("ours"))
    assert brief.filter(bug) and bug.exc_info
    assert brief.filter(logging.LogRecord("holdfast.porch", logging.INFO, "", 0, "as ever", (), None))


async def test_a_page_whose_name_now_leads_here_cannot_enrol(desk_of: Open, tmp_path: Path) -> None:
    """A browser sends no Origin with a GET of the page's own name, whatever address that name has by now."""
    answers = {
        "controller.holdfast": b" 400 ",
        "127.0.0.1": b" 400 ",
        "evil.test": b" 403 ",
        "evil.test:29400": b" 403 ",
    }
    async with _port(desk_of, tmp_path, locked=True) as listener:
        for host, status in answers.items():
            request = f"GET /enrol HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
            proof = mutual_tls.unproved_tls()
            assert status in await asyncio.to_thread(_asked, listener.getsockname(), request, proof), host


async def test_whoever_is_refused_has_to_call_again(desk_of: Open, tmp_path: Path) -> None:
    """A link that is there already costs its caller nothing, and us an answer each time."""

    def answers(address: tuple[str, int]) -> int:
        with socket.create_connection(address, timeout=30) as link:
            link.sendall(_STATUS * 50)
            return b"".join(iter(lambda: link.recv(1 << 16), b"")).count(b"HTTP/1.1 401")

    async with _port(desk_of, tmp_path, locked=False) as listener:
        assert await asyncio.to_thread(answers, listener.getsockname()) == 1


@pytest.mark.parametrize("expects", ["foo", "100-continue"])
async def test_a_header_that_the_server_answers_itself_ends_the_link_too(
    desk_of: Open, tmp_path: Path, expects: str
) -> None:
    """It is answered before anybody asks who calls."""
    request = f"GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\nExpect: {expects}\r\n\r\n".encode()

    def answers(address: tuple[str, int]) -> int:
        with socket.create_connection(address, timeout=30) as link:
            link.sendall(request * 50)
            heard = b"".join(iter(lambda: link.recv(1 << 16), b""))
            return heard.count(b"HTTP/1.1 4")

    async with _port(desk_of, tmp_path, locked=False) as listener:
        assert await asyncio.to_thread(answers, listener.getsockname()) == 1


async def test_what_is_compressed_is_not_unpacked(desk_of: Open, tmp_path: Path) -> None:
    """A gigabyte of nothing is a megabyte when it is sent."""
    packing = zlib.compressobj()
    block = packing.compress(bytes(1 << 20)) + packing.flush(zlib.Z_FULL_FLUSH)
    more = (packing.compress(bytes(1 << 20)) + packing.flush(zlib.Z_FULL_FLUSH)) * 1000
    head = b"POST /enrol HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: deflate\r\nContent-Length: %d\r\n\r\n"
    async with _port(desk_of, tmp_path, locked=False) as listener:
        began_s = time.thread_time()  # the port is served in this thread
        request = head % len(block + more) + block + more
        assert b" 4" in await asyncio.to_thread(_asked, listener.getsockname(), request)
        await asyncio.to_thread(_asked, listener.getsockname(), _STATUS)
        assert time.thread_time() - began_s < 0.5


async def test_requests_that_are_none_take_little_memory(desk_of: Open, tmp_path: Path) -> None:
    """What was read of them is kept with what is said of them, until somebody looks for garbage."""

    def send(address: tuple[str, int]) -> None:
        with socket.create_connection(address, timeout=30) as link, contextlib.suppress(OSError):
            link.sendall(b"GET / HTTP/1.1\r\nx: " + bytes(1 << 20))
            link.recv(4096)

    async with _port(desk_of, tmp_path, locked=False) as listener:
        gc.disable()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(LINKS):
                await asyncio.to_thread(send, listener.getsockname())
            each = (tracemalloc.get_traced_memory()[0] - before) / LINKS
        finally:
            tracemalloc.stop()
            gc.enable()
        assert each < 2_000_000, f"{each:.0f} bytes of each are kept"


async def test_links_of_tls_take_little_memory(desk_of: Open, tmp_path: Path) -> None:
    proof = mutual_tls.unproved_tls()
    async with _port(desk_of, tmp_path, locked=True) as listener:
        where = listener.getsockname()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            links = [await asyncio.open_connection(*where, ssl=proof) for _ in range(LINKS)]
            each = (tracemalloc.get_traced_memory()[0] - before) / LINKS
        finally:
            tracemalloc.stop()
        for _, writer in links:
            writer.close()
        assert each < 200_000, f"{each:.0f} bytes for both ends of a link"


async def test_a_burst_of_one_host_is_attended_to_in_turn(desk_of: Open, tmp_path: Path) -> None:
    """None is broken off for the next, though all come at once from one address."""
    proof, count = mutual_tls.unproved_tls(), 400
    async with _port(desk_of, tmp_path, locked=True) as listener:
        links = [asyncio.open_connection(*listener.getsockname(), ssl=proof) for _ in range(count)]
        shaken = await asyncio.gather(*links, return_exceptions=True)
        failed = [one for one in shaken if isinstance(one, BaseException)]
        for _, writer in [one for one in shaken if not isinstance(one, BaseException)]:
            writer.close()
        assert not failed, failed[:3]


async def test_a_link_that_makes_room_as_its_handshake_ends_is_not_closed_beneath_its_transport(tmp_path: Path) -> None:
    """The transport would stay, and go on with the number of a file that is another link's by then."""
    tls = mutual_tls.server_tls(CertificateAuthority(tmp_path / "door").keys, strangers=True)
    lost = asyncio.Event()

    class Leaving(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            served.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            lost.set()

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    served = asyncio.create_task(ConnectionGate(Leaving, tls)._serve_link(ours, "host"))
    reader, writer = await asyncio.open_connection(sock=theirs, ssl=mutual_tls.unproved_tls(), server_hostname="")
    async with asyncio.timeout(20):  # asyncio's own patience with such a link is 30 s
        await lost.wait()
        with contextlib.suppress(OSError):
            await reader.read()
    writer.close()
    assert ours.fileno() == -1, "closed, by its transport"
