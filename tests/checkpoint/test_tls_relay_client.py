"""Large copies between hosts by relays: whole, without leftovers, and made up for where a relay fails."""

import socket
import threading
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from holdfast.checkpoint import peer_transport
from holdfast.checkpoint.byte_pacer import BytePacer
from holdfast.checkpoint.peer_admission import PeerAdmission
from holdfast.checkpoint.peer_transport import (
    CHUNK_BYTES,
    MOST_LINKS,
    PeerKeeper,
    TransportError,
    cut_chunks,
    pull_state,
    push_state,
)
from holdfast.checkpoint.tls_relay_client import REVOKED, relayed_link
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.credentials.certificate_authority import CertificateAuthority, enrol_local_node
from holdfast.wire.credentials.mutual_tls import KeyFiles
from tests.checkpoint import test_peer_transport
from tests.checkpoint.test_peer_transport import ASK, LARGE, PULL, Keeper
from tests.cli.driver import until

authority, large = test_peer_transport.authority, test_peer_transport.large  # fixtures


@pytest.fixture(autouse=True)
def relays_from_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transport, "_RELAYED_BYTES", 0)


def pull_large(callee: PeerKeeper) -> bool:
    """Whether all came as it was; a difference of so many bytes is not for printing."""
    into = bytearray(len(LARGE))
    assert pull_state(callee._replace(relayed=True), PULL, [memoryview(into)]) == len(LARGE)
    assert not relays(), "relays end with their links"
    return into == LARGE


def relays() -> list[psutil.Process]:
    """The relays of this process, which may have children of other tests."""

    def is_relay(child: psutil.Process) -> bool:
        try:
            return "holdfast.checkpoint.tls_relay_main" in child.cmdline()
        except psutil.NoSuchProcess:
            return False

    return [child for child in psutil.Process().children() if is_relay(child)]


def filled(keeper: Keeper) -> Keeper:
    keeper.memory[:] = LARGE
    return keeper


def test_a_large_pull_goes_by_relays(large: tuple[Keeper, PeerKeeper]) -> None:
    keeper, callee = filled(large[0]), large[1]
    assert pull_large(callee)
    assert keeper.links == 1 + MOST_LINKS


def test_a_relay_that_is_killed_is_made_up_for(
    large: tuple[Keeper, PeerKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    callee, real = large[1], peer_transport.receive_chunk
    filled(large[0])
    killed: list[psutil.Process] = []
    lock = threading.Lock()

    def receive_chunk(link: socket.socket, chunk: memoryview, number: int) -> bytes:
        with lock:
            if link.family == socket.AF_UNIX and not killed:
                killed.extend(relays()[:1])
                killed[0].kill()
        return real(link, chunk, number)

    monkeypatch.setattr(peer_transport, "receive_chunk", receive_chunk)
    assert pull_large(callee) and killed


def test_a_keeper_that_admits_no_relay_is_asked_by_a_plain_link(large: tuple[Keeper, PeerKeeper]) -> None:
    keeper, callee = filled(large[0]), large[1]
    keeper.refused_links = range(2, 2 + MOST_LINKS)
    assert pull_large(callee)


def test_a_relay_says_why_there_is_no_link(large: tuple[Keeper, PeerKeeper]) -> None:
    guard = large[1].guard
    assert guard
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = listener.getsockname()
    with pytest.raises(OSError, match="refused"), relayed_link(nobody, guard.keys, guard.accepts_certificate):
        pass
    with (
        pytest.raises(PermissionError, match=REVOKED),
        relayed_link(large[1].address, guard.keys, lambda certificate: False),
    ):
        pass
    assert not relays()


# --- pushes ----------------------------------------------------------------------------------------------------


def push_large(callee: PeerKeeper, bytes_s: float = 0) -> int:
    return push_state(callee._replace(relayed=True), ASK, [memoryview(LARGE)], BytePacer(bytes_s))


def has_all(keeper: Keeper) -> bool:
    """Whether all came as it was, and was sealed once; a difference of so many bytes is not for printing."""
    until(lambda: not relays(), "relays end with their links")
    return keeper.ends == 1 and keeper.memory == LARGE


def parts_asked(keeper: Keeper) -> list[tuple[int, int]]:
    return [ask.part for ask in keeper.asked if ask.part]


def test_a_large_push_goes_by_relays_of_the_receiver(
    large: tuple[Keeper, PeerKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, callee = large
    real, seen = peer_transport.send_chunk, set[int]()

    def send_chunk(link: socket.socket, chunk: memoryview, pacer: BytePacer) -> None:
        seen.update(relay.pid for relay in relays())
        real(link, chunk, pacer)

    monkeypatch.setattr(peer_transport, "send_chunk", send_chunk)
    assert push_large(callee) == len(LARGE)
    assert has_all(keeper) and keeper.pushed_by == "b"
    assert keeper.links == 1 + MOST_LINKS and 1 < len(seen) <= MOST_LINKS
    assert sorted(parts_asked(keeper)) == [(0, 1), (1, 5), (5, 9), (9, 13), (13, 15)]


def test_a_push_goes_on_where_it_broke(large: tuple[Keeper, PeerKeeper]) -> None:
    keeper, callee = large
    keeper.memory[: 6 * CHUNK_BYTES], keeper.holding.done = LARGE[: 6 * CHUNK_BYTES], 6
    assert push_large(callee) == len(LARGE) - 6 * CHUNK_BYTES
    assert has_all(keeper) and min(parts_asked(keeper)) == (6, 7)


def test_a_relay_of_the_receiver_that_is_killed_is_made_up_for(
    large: tuple[Keeper, PeerKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, callee = large
    real, killed, lock = peer_transport.send_chunk, list[psutil.Process](), threading.Lock()

    def send_chunk(link: socket.socket, chunk: memoryview, pacer: BytePacer) -> None:
        with lock:
            if not killed:
                killed.extend(relays()[:1])
                killed[0].kill()
        real(link, chunk, pacer)

    monkeypatch.setattr(peer_transport, "send_chunk", send_chunk)
    assert push_large(callee) >= len(LARGE)
    assert killed and has_all(keeper)


def test_a_receiver_that_refuses_the_certificates_of_relays_is_sent_all_by_one_link(
    large: tuple[Keeper, PeerKeeper],
) -> None:
    keeper, callee = large
    keeper.refused_links = range(2, 2 + MOST_LINKS)
    assert push_large(callee) == len(LARGE)
    assert has_all(keeper) and keeper.links == 2 + MOST_LINKS


def test_a_push_that_is_given_up_ends_on_all_links(large: tuple[Keeper, PeerKeeper]) -> None:
    class Ended(BytePacer):
        def spend_bytes(self, count: int) -> None:
            if len(keeper.here()) > 2:
                raise TransportError("the transfer was given up for a newer one")

    keeper, callee = large
    with pytest.raises(TransportError, match="given up"):
        push_state(callee._replace(relayed=True), ASK, [memoryview(LARGE)], Ended(0))
    until(lambda: not relays(), "relays end with their links")
    assert not keeper.sealed.is_set()
    assert push_large(callee) <= len(LARGE) and has_all(keeper)


def mix_chunk(keeper: Keeper, number: int, chunk: memoryview, digest: bytes) -> None:
    """As parities take chunks: in their order, by copies of them."""
    assert number == keeper.holding.done
    memoryview(keeper.memory)[number * CHUNK_BYTES :][: len(chunk)] = chunk
    keeper.holding.done += 1


@pytest.mark.parametrize("why", ["slow", "small", "parity"])
def test_a_push_by_one_link(large: tuple[Keeper, PeerKeeper], monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """At a slow pace, or if it is small; and halves of a parity, which come in their order."""
    keeper, callee = large
    if why == "small":
        monkeypatch.setattr(peer_transport, "_RELAYED_BYTES", len(LARGE) + 1)
    if why == "parity":
        keeper.holding.mix = partial(mix_chunk, keeper)
    assert push_large(callee, 900e6 if why == "slow" else 0) == len(LARGE)
    assert keeper.links == 1 and has_all(keeper) and not parts_asked(keeper)


# --- older keepers ---------------------------------------------------------------------------------------------


def test_an_older_keeper_is_sent_all_by_one_link(large: tuple[Keeper, PeerKeeper], tmp_path: Path) -> None:
    """It knows neither links nor parts, and its answer has no tickets."""
    keys, into = KeyFiles.in_folder(tmp_path / "a"), bytearray(len(LARGE))

    def take_push(listener: socket.socket) -> None:
        link = mutual_tls.server_tls(keys, strangers=False).wrap_socket(listener.accept()[0], server_side=True)
        with link:
            assert msgspec.json.decode(peer_transport.read_line(link))["verb"] == "push"
            link.sendall(b'{"error":"","code":"","chunks":0,"bytes":0}\n')
            for number, chunk in enumerate(cut_chunks([memoryview(into)])):
                peer_transport.receive_chunk(link, chunk, number)
            link.sendall(b'{"error":"","code":"","chunks":15,"bytes":0}\n')

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=take_push, args=(listener,))
        thread.start()
        assert push_large(large[1]._replace(address=listener.getsockname())) == len(LARGE)
        thread.join()
    assert into == LARGE


def test_an_older_keeper_sends_all_by_one_link(large: tuple[Keeper, PeerKeeper]) -> None:
    keeper, callee = large
    with peer_transport._connect_keeper(callee) as link:
        link.sendall(b'{"verb":"push","rank":1,"layout":"ab","world":2,"step":7,"generation":3,"floor":-1}\n')
        assert peer_transport._read_reply(link).chunks == 0
        for chunk in cut_chunks([memoryview(LARGE)]):
            peer_transport.send_chunk(link, chunk)
        assert peer_transport._read_reply(link).chunks == 15
    assert has_all(keeper)


# --- who may have a process decrypt ----------------------------------------------------------------------------


def test_strangers_start_no_process(large: tuple[Keeper, PeerKeeper]) -> None:
    for word in (b"", b"\x16", b"0" * 32, b"f" * 33, b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(large[1].address) as link:
            link.sendall(word)
            link.shutdown(socket.SHUT_WR)
            assert all(said < b"\x16" for said in iter(partial(link.recv, 99), b"")), "an alert of TLS at most"
            assert not relays()
    assert not large[0].asked


def tickets_for(callee: PeerKeeper) -> tuple[str, ...]:
    with peer_transport._connect_keeper(callee) as link:
        return peer_transport._send_request(link, msgspec.structs.replace(ASK, links=MOST_LINKS)).tickets


def test_a_stolen_ticket_opens_nothing(
    large: tuple[Keeper, PeerKeeper], authority: CertificateAuthority, tmp_path: Path
) -> None:
    """Without a certificate, with one of another job, and with one of another node of this job."""
    keeper, callee = large
    strangers = CertificateAuthority(tmp_path / "other")
    thieves = [enrol_local_node(strangers, "b", tmp_path / "s"), enrol_local_node(authority, "c", tmp_path / "c")]
    stolen = tickets_for(callee)
    asked = len(keeper.asked)
    for ticket, keys in zip(stolen, [None, *thieves], strict=False):
        thief = PeerKeeper(callee.address, keys and PeerAdmission(keys, lambda node, serial: True))
        with pytest.raises(TransportError), peer_transport._connect_keeper(thief, ticket) as link:
            peer_transport._send_request(link, ASK)
    until(lambda: not relays(), "relays end with their links")
    assert len(keeper.asked) == asked
    assert push_large(callee) == len(LARGE) and has_all(keeper), "and its owner is served"


def test_a_ticket_opens_one_relay(large: tuple[Keeper, PeerKeeper]) -> None:
    """Whoever shows it again has an ordinary link, in a thread of the keeper."""
    callee = large[1]
    ticket = tickets_for(callee)[0]
    with (
        peer_transport._connect_keeper(callee, ticket) as first,
        peer_transport._connect_keeper(callee, ticket) as second,
    ):
        for link in (first, second):
            peer_transport._send_request(link, msgspec.structs.replace(ASK, part=(3, 3)))
        assert len(relays()) == 1
    until(lambda: not relays(), "relays end with their links")
