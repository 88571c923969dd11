"""The controller's port under a flood of links from many addresses: real sockets, and an honest caller among them."""

import asyncio
import contextlib
import itertools
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from holdfast.controller.access import connection_gate
from holdfast.controller.access.caller_queue import CallerQueue
from holdfast.controller.access.connection_gate import ConnectionGate
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.credentials.certificate_authority import CertificateAuthority

RATE_HZ = 200
MOST = 2000  # links of a flood, after which the caller was kept out
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
PROOF = b"GET / HTTP/1.1\r\nHost: localhost\r\nProof: yes\r\n\r\n"


class _Answering(asyncio.Protocol):
    """Answers every request; the link stays only if there was a proof in it, as at the controller's port."""

    def __init__(self, gate: list[ConnectionGate]) -> None:
        self._gate = gate

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if b"Proof" in data:
            self._gate[0].note_proved(self._transport)
        self._transport.write(b"HTTP/1.1 200 OK\r\n\r\n")


@contextlib.asynccontextmanager
async def _port(folder: Path | None) -> AsyncIterator[tuple[str, int]]:
    """A gate, with TLS if it gets a folder."""
    gate: list[ConnectionGate] = []
    tls = mutual_tls.server_tls(CertificateAuthority(folder / "door").keys, strangers=True) if folder else None
    gate.append(ConnectionGate(lambda: _Answering(gate), tls))
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        receiving = asyncio.create_task(gate[0].run(listener))
        try:
            yield listener.getsockname()
        finally:
            receiving.cancel()
            await asyncio.wait([receiving])
            await asyncio.sleep(0.1)  # links that were being accepted are shut down, and asyncio closes them


@contextlib.contextmanager
def _flood(where: tuple[str, int], addresses: int, said: bytes) -> Iterator[list[int]]:
    """Links that say so much, or nothing, from so many addresses, until the end; yields how many there were."""
    opened, ending = [0], threading.Event()

    def call() -> None:
        links: deque[socket.socket] = deque()
        began_at = time.monotonic()
        for number in itertools.count():
            while not ending.is_set() and number > (time.monotonic() - began_at) * RATE_HZ:
                time.sleep(0.005)
            if ending.is_set():
                break
            link = socket.socket()
            with contextlib.suppress(OSError):
                link.bind((f"127.{1 + number % addresses // 250}.0.{1 + number % addresses % 250}", 0))
                link.settimeout(5.0)
                link.connect(where)
                link.sendall(said)
            links.append(link)
            opened[0] += 1
            if len(links) > 500:
                links.popleft().close()
        for link in links:
            link.close()

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield opened
    finally:
        ending.set()
        thread.join()


def _asked(where: tuple[str, int], request: bytes, tls: ssl.SSLContext | None = None) -> bool:
    """Whether there was an answer on one link; as agents do, one waits for it as long as the link lives."""
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        link: socket.socket = stack.enter_context(socket.create_connection(where, timeout=60))
        link = stack.enter_context(tls.wrap_socket(link)) if tls else link
        link.sendall(request)
        return link.recv(100).startswith(b"HTTP/1.1 200")
    return False


def _answered(where: tuple[str, int], opened: list[int], request: bytes, tls: ssl.SSLContext | None = None) -> None:
    """Wait until the caller, who calls again when its link is closed, is answered; by the flood's own pace."""
    most = opened[0] + MOST
    while not _asked(where, request, tls) and opened[0] < most:
        pass
    assert opened[0] < most, f"no answer while a flood opened {MOST} links"


def _hello() -> bytes:
    out, tls = ssl.MemoryBIO(), mutual_tls.unproved_tls()
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


@pytest.fixture(autouse=True)
def _few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in (("_FROM_ONE_HOST", 8), ("_IN_ALL", 16), ("_QUEUED", 64)):
        monkeypatch.setattr(connection_gate, name, few)
    monkeypatch.setattr(connection_gate, "_IDLE_S", 30.0)  # so that nobody gets in by waiting for others' time to pass


@pytest.mark.parametrize("addresses", [1, 200, 2000])
@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: loc"], ids=["idle", "half a request"])
async def test_links_that_ask_nothing_keep_nobody_out(addresses: int, said: bytes) -> None:
    async with _port(None) as where:
        with _flood(where, addresses, said) as opened:
            await asyncio.to_thread(_until_opened, opened, 100)
            await asyncio.to_thread(_answered, where, opened, REQUEST)


async def test_half_a_hello_from_many_addresses_keeps_nobody_out(tmp_path: Path) -> None:
    async with _port(tmp_path) as where:
        with _flood(where, 200, _hello()[:50]) as opened:
            await asyncio.to_thread(_until_opened, opened, 100)
            tls = mutual_tls.unproved_tls()
            await asyncio.to_thread(_answered, where, opened, REQUEST, tls)


@pytest.mark.parametrize("addresses", [200, 2000])
async def test_whoever_has_proved_itself_gets_in_past_strangers_that_ask(addresses: int, tmp_path: Path) -> None:
    """Each has begun a handshake, and none will end it; that costs us as much as an honest one."""
    async with _port(tmp_path) as where:
        tls = mutual_tls.unproved_tls()
        assert await asyncio.to_thread(_asked, where, PROOF, tls)
        with _flood(where, addresses, _hello()) as opened:
            await asyncio.to_thread(_until_opened, opened, 100)
            await asyncio.to_thread(_answered, where, opened, REQUEST, tls)


async def test_strangers_that_ask_take_turns_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a flood of requests from a few addresses does not keep a new caller waiting for all of them."""
    monkeypatch.setattr(connection_gate, "_IDLE_S", 0.2)
    async with _port(None) as where:
        with _flood(where, 20, REQUEST) as opened:
            await asyncio.to_thread(_until_opened, opened, 100)
            await asyncio.to_thread(_answered, where, opened, REQUEST)


def _until_opened(opened: list[int], count: int) -> None:
    began_at = time.monotonic()
    while opened[0] < count:
        assert time.monotonic() < began_at + 60, f"a flood of {opened[0]} links"
        time.sleep(0.01)


async def test_who_ends_in_half_a_request_is_closed_at_once() -> None:
    """It stays readable for ever, so whoever waited for the rest would never rest himself."""
    async with _port(None) as where:
        reader, writer = await asyncio.open_connection(*where)
        writer.write(b"GET / HTTP/1.1\r\n")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.write_eof()
        async with asyncio.timeout(5.0):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


async def test_a_request_in_pieces_is_answered() -> None:
    async with _port(None) as where:
        reader, writer = await asyncio.open_connection(*where)
        for piece in (REQUEST[:3], REQUEST[3:20], REQUEST[20:-1], REQUEST[-1:]):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_an_idle_link_is_closed_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_gate, "_PROVE_S", 0.2)
    async with _port(None) as where:
        links = [await asyncio.open_connection(*where) for _ in range(3)]
        async with asyncio.timeout(30.0):
            assert [await reader.read() for reader, _ in links] == [b""] * 3
        for _, writer in links:
            writer.close()


def test_a_line_takes_from_the_greedy_and_gives_turns_by_host() -> None:
    line: CallerQueue[str] = CallerQueue()
    for number, one in enumerate(["b1", "a1", "a2", "a3", "c1"]):
        line.add(one, one[0], float(number))
    assert line.crowded_out("a") == "a1" and line.crowded_out("c") == "b1"
    assert line.oldest() == ("b1", 0.0) and line.oldest("c") == ("c1", 4.0)
    turns = [line.take_turn(lambda host: host != "c") for _ in range(5)]
    assert turns == [("b1", "b"), ("a1", "a"), ("a2", "a"), ("a3", "a"), None]
    line.remove("c1")
    line.remove("c1")
    assert len(line) == 0 and line.count("c") == 0 and line.host_of("c1") is None


async def test_strangers_by_the_hundred_leave_known_hosts_their_share_of_every_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each handshake holds the event loop; a known host is served after a few turns, whatever else waits."""
    for name in ("_IN_ALL", "_QUEUED"):
        monkeypatch.setattr(connection_gate, name, 1000)
    begun, all_begun = list[str](), asyncio.Event()

    async def serve(link: socket.socket, host: str) -> None:
        begun.append(host)
        if len(begun) == 300:
            all_begun.set()
        with contextlib.closing(link):
            await asyncio.sleep(0)

    rooms = [connection_gate._Room(serve, lambda said: 0) for _ in range(2)]
    ends: list[socket.socket] = []
    for room in rooms:
        room.open()
    try:
        for number in range(300):
            ours, theirs = socket.socketpair()
            ends.append(theirs)
            theirs.sendall(b"hello")
            ours.setblocking(False)
            known = number == 299
            rooms[known].admit(ours, "known" if known else f"10.0.0.{number}")
        async with asyncio.timeout(60):
            await all_begun.wait()
    finally:
        for room in rooms:
            room.close()
        for link in ends:
            link.close()
    assert begun.index("known") <= 4 * connection_gate._BEGUN_AT_ONCE, "after few strangers"
