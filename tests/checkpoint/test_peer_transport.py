"""State between keepers: whole, checked, resumed, and only for those who prove that they may have it."""

import contextlib
import errno
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash

from holdfast.checkpoint import peer_server, peer_transport
from holdfast.checkpoint.byte_pacer import BytePacer
from holdfast.checkpoint.peer_admission import PeerAdmission
from holdfast.checkpoint.peer_server import PeerServer, PushTarget
from holdfast.checkpoint.peer_transport import (
    CHUNK_BYTES,
    PeerKeeper,
    PeerRefusal,
    PeerRequest,
    RefusalCode,
    TransportError,
    pull_state,
    push_state,
)
from holdfast.checkpoint.tls_relay_client import REVOKED
from holdfast.wire import unix_sockets
from holdfast.wire.credentials.certificate_authority import CertificateAuthority, enrol_local_node
from holdfast.wire.credentials.mutual_tls import KeyFiles, certificate_serial
from tests.cli.driver import until
from tests.wire.given import Organisation

ASK = PeerRequest(verb="push", rank=1, world=2, step=7, generation=3, layout="ab")
STATE = os.urandom(2 * CHUNK_BYTES + 12345)


class Keeper:
    """A keeper's two answers, over plain memory."""

    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)
        self.sealed = threading.Event()
        self.asked: list[PeerRequest] = []
        self.holding = PushTarget([memoryview(self.memory)], 0, self.end)
        self.ends = self.links = 0
        self._link = threading.local()
        self.most = 99  # links that are let in
        self.refused_links = range(0)  # by their number, from 1 on
        self.refuse: PeerRefusal | None = None
        self.peers: set[str] = set()  # serials of those who may call

    def end(self) -> None:
        self.ends += 1
        self.sealed.set()

    def counts(self, node: str, serial: str) -> bool:
        """It is asked when a link comes and at each of its requests, by the thread that the link has."""
        if not hasattr(self._link, "counts"):
            self.links += 1
            self._link.counts = self.links <= self.most and self.links not in self.refused_links
        return bool(self._link.counts)

    def here(self) -> set[int]:
        return {*range(self.holding.done), *self.holding.beyond}

    def take(self, ask: PeerRequest, node: str = "") -> PushTarget | PeerRefusal:
        self.asked, self.pushed_by = [*self.asked, ask], node
        return self.refuse or self.holding

    def give(self, ask: PeerRequest) -> tuple[list[memoryview], object] | PeerRefusal:
        self.asked.append(ask)
        return self.refuse or ([memoryview(self.memory)[a:b] for a, b in ask.ranges], lambda: None)


@pytest.fixture
def keeper() -> Keeper:
    return Keeper(len(STATE))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("door") / "door")


def serial(keys: KeyFiles) -> str:
    shown = ssl._ssl._test_decode_cert(str(keys.certificate))  # type: ignore[attr-defined]
    return certificate_serial(shown)


@pytest.fixture(params=["unix", "tls"])
def callee(
    request: pytest.FixtureRequest, keeper: Keeper, tmp_path: Path, authority: CertificateAuthority
) -> Iterator[PeerKeeper]:
    """As on one host, and as between two."""
    if request.param == "unix":
        listener, keys = unix_sockets.listen(tmp_path / "k.sock"), None
        address = (str(tmp_path / "k.sock"), 0)
    else:
        listener, keys = socket.create_server(("127.0.0.1", 0)), enrol_local_node(authority, "a", tmp_path / "a")
        address = listener.getsockname()
    guard = keys and PeerAdmission(keys, lambda node, serial: serial in keeper.peers)
    PeerServer(listener, guard, keeper.take, keeper.give).start()  # type: ignore[arg-type]
    ours = keys and enrol_local_node(authority, "b", tmp_path / "b")
    if keys and ours:
        keeper.peers.update((serial(ours), serial(keys)))
    yield PeerKeeper(address, ours and PeerAdmission(ours, lambda node, serial: serial in keeper.peers))
    listener.close()


def test_push_and_pull_are_exact(keeper: Keeper, callee: PeerKeeper) -> None:
    assert push_state(callee, ASK, [memoryview(STATE)], BytePacer(0)) == len(STATE)
    assert keeper.sealed.wait(10) and bytes(keeper.memory) == STATE
    assert keeper.pushed_by == ("b" if callee.guard else ""), "its certificate says so, or it is on this host"
    ranges = ((5, CHUNK_BYTES + 9), (2 * CHUNK_BYTES, len(STATE)))
    into = [memoryview(bytearray(end - start)) for start, end in ranges]
    pull_state(callee, msgspec.structs.replace(ASK, verb="pull", ranges=ranges), into)
    assert [bytes(view) for view in into] == [STATE[start:end] for start, end in ranges]


def test_a_push_goes_on_where_it_broke(keeper: Keeper, callee: PeerKeeper) -> None:
    keeper.memory[: 2 * CHUNK_BYTES] = STATE[: 2 * CHUNK_BYTES]
    keeper.holding.done = 2
    assert push_state(callee, ASK, [memoryview(STATE)], BytePacer(0)) == 12345
    assert keeper.sealed.wait(10) and bytes(keeper.memory) == STATE


def test_what_a_broken_link_delivers_late_does_no_harm(keeper: Keeper, callee: PeerKeeper) -> None:
    """A second link has been told where to go on; then the first, thought dead, brings one chunk more."""
    with peer_transport._connect_keeper(callee) as link:
        link.sendall(msgspec.json.encode(ASK) + b"\n")
        peer_transport._read_reply(link)
        keeper.memory[:CHUNK_BYTES] = STATE[:CHUNK_BYTES]  # by the other link
        keeper.holding.done = 1
        for chunk in peer_transport.cut_chunks([memoryview(STATE)]):
            peer_transport.send_chunk(link, chunk)
        peer_transport._read_reply(link)
    assert keeper.sealed.wait(10) and bytes(keeper.memory) == STATE


def test_a_stranger_is_refused(keeper: Keeper, callee: PeerKeeper, tmp_path: Path) -> None:
    """Who has no certificate, or one of another job, gets nothing; on one host the kernel keeps other users out."""
    if callee.guard is None:
        pytest.skip("see tests/cli/test_attacks.py")
    other = enrol_local_node(CertificateAuthority(tmp_path / "other"), "b", tmp_path / "stranger")
    for keys in (None, other):
        with pytest.raises(TransportError):
            push_state(
                PeerKeeper(callee.address, keys and PeerAdmission(keys, lambda node, serial: True)),
                ASK,
                [memoryview(STATE)],
                BytePacer(0),
            )
    assert not keeper.asked


def test_a_certificate_that_counts_no_more(keeper: Keeper, callee: PeerKeeper) -> None:
    if callee.guard is None:
        pytest.skip("on one host there are none")
    assert push_state(callee, ASK, [memoryview(STATE)], BytePacer(0)) == len(STATE)
    keeper.peers.clear()  # it was evicted
    with pytest.raises(TransportError):
        push_state(callee, ASK, [memoryview(STATE)], BytePacer(0))
    assert len(keeper.asked) == 1


def test_state_is_not_given_to_a_node_that_was_evicted(keeper: Keeper, callee: PeerKeeper) -> None:
    if callee.guard is None:
        pytest.skip("on one host there are no certificates")
    wary = PeerAdmission(callee.guard.keys, lambda node, serial: False)
    with pytest.raises(TransportError, match=REVOKED):
        push_state(PeerKeeper(callee.address, wary), ASK, [memoryview(STATE)], BytePacer(0))
    assert not keeper.asked


def test_others_whom_the_users_authority_has_signed(keeper: Keeper, tmp_path: Path) -> None:
    """It may have signed web servers, and nodes of other runs: neither has to do with our state."""
    ours = Organisation(tmp_path / "ca")
    guard, everybody = PeerAdmission(ours.keys("a", "r"), lambda node, serial: True, "r"), lambda node, serial: True
    with socket.create_server(("127.0.0.1", 0)) as listener:
        PeerServer(listener, guard, keeper.take, keeper.give).start()  # type: ignore[arg-type]
        for node, run in (("", ""), ("b", "theirs")):
            stranger = PeerAdmission(ours.keys(node, run), everybody)
            with pytest.raises(TransportError):
                push_state(PeerKeeper(listener.getsockname(), stranger), ASK, [memoryview(STATE)], BytePacer(0))
        assert not keeper.asked
        for node, run in (("c", ""), ("b", "r")):
            node_of_ours = PeerKeeper(listener.getsockname(), PeerAdmission(ours.keys(node, run), everybody))
            push_state(node_of_ours, ASK, [memoryview(STATE)], BytePacer(0))
        assert len(keeper.asked) == 2
    for wary in (  # of a node that was evicted, with another certificate for the same name
        PeerAdmission(ours.keys("a"), lambda node, serial: node != "b"),
        PeerAdmission(ours.keys("a"), everybody, is_leaving=lambda node, serial: node == "b"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            PeerServer(listener, wary, keeper.take, keeper.give).start()  # type: ignore[arg-type]
            evicted = PeerKeeper(listener.getsockname(), PeerAdmission(ours.keys("b"), everybody))
            with pytest.raises(TransportError):
                push_state(evicted, ASK, [memoryview(STATE)], BytePacer(0))
            assert len(keeper.asked) == 2
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = PeerAdmission(ours.keys("a", "theirs"), everybody)
        PeerServer(listener, theirs, keeper.take, keeper.give).start()  # type: ignore[arg-type]
        with pytest.raises(TransportError, match=REVOKED):
            push_state(PeerKeeper(listener.getsockname(), guard), ASK, [memoryview(STATE)], BytePacer(0))


def test_an_impostor_gets_nothing(keeper: Keeper, authority: CertificateAuthority, tmp_path: Path) -> None:
    """A listener where a keeper used to be, with a certificate that nobody here has signed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = enrol_local_node(CertificateAuthority(tmp_path / "other"), "a", tmp_path / "a")
        PeerServer(listener, PeerAdmission(theirs, lambda node, serial: True), keeper.take, keeper.give).start()  # type: ignore[arg-type]
        ours = enrol_local_node(authority, "b", tmp_path / "b")
        with pytest.raises(TransportError, match=r"127\.0\.0\.1:\d+.*CERTIFICATE_VERIFY_FAILED"):
            push_state(
                PeerKeeper(listener.getsockname(), PeerAdmission(ours, lambda node, serial: True)),
                ASK,
                [memoryview(STATE)],
                BytePacer(0),
            )
    assert not keeper.asked


def test_those_who_say_nothing_keep_nobody_out(keeper: Keeper, callee: PeerKeeper) -> None:
    """A thousand links that prove nothing; whoever calls from elsewhere, or a little later, is served."""
    idle = []
    for _ in range(1100):
        link = socket.socket(socket.AF_INET if callee.guard else socket.AF_UNIX)
        link.setblocking(False)
        with contextlib.suppress(OSError):
            link.connect(callee.address if callee.guard else callee.address[0])
        idle.append(link)
    until(lambda: _pushed(callee), "the keeper answers")
    assert keeper.sealed.wait(10) and bytes(keeper.memory) == STATE
    for link in idle:
        link.close()


def _pushed(callee: PeerKeeper) -> bool:
    try:
        return push_state(callee, ASK, [memoryview(STATE)], BytePacer(0)) == len(STATE)
    except TransportError:
        return False


def test_a_refusal_is_told(keeper: Keeper, callee: PeerKeeper) -> None:
    keeper.refuse = PeerRefusal("generation 3 is over", RefusalCode.SUPERSEDED)
    with pytest.raises(TransportError, match="generation 3 is over") as refused:
        push_state(callee, ASK, [memoryview(STATE)], BytePacer(0))
    assert refused.value.code is RefusalCode.SUPERSEDED


def test_damage_on_the_way_is_seen(keeper: Keeper, callee: PeerKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(link: socket.socket, chunk: memoryview, pacer: BytePacer) -> None:
        whole = bytearray(chunk)
        digest = xxhash.xxh3_64_digest(whole)
        whole[len(whole) // 2] ^= 1
        try:
            link.sendall(whole + digest)
        except OSError as e:
            raise TransportError(str(e)) from None

    monkeypatch.setattr(peer_transport, "send_chunk", damaged)
    with pytest.raises(TransportError):
        push_state(callee, ASK, [memoryview(STATE)], BytePacer(0))
    assert not keeper.sealed.is_set()
    assert keeper.holding.done == 0


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        callee = PeerKeeper(listener.getsockname())
    with pytest.raises(TransportError, match=os.strerror(errno.ECONNREFUSED)):
        push_state(callee, ASK, [memoryview(STATE)], BytePacer(0))


def test_the_pacer_keeps_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda s: clock.__setitem__(0, clock[0] + s))
    pacer = BytePacer(10.0)
    for _ in range(50):
        pacer.spend_bytes(10)
    assert 48.0 <= clock[0] - 100.0 <= 50.0


# --- several links at once -------------------------------------------------------------------------------------

LARGE = os.urandom(CHUNK_BYTES) * 14 + os.urandom(4321)  # three parts and more


@pytest.fixture
def large(tmp_path: Path, authority: CertificateAuthority) -> Iterator[tuple[Keeper, PeerKeeper]]:
    """Between two hosts, and more than one link carries at once."""
    keeper = Keeper(len(LARGE))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        guard = PeerAdmission(enrol_local_node(authority, "a", tmp_path / "a"), keeper.counts)
        PeerServer(listener, guard, keeper.take, keeper.give, 8).start()  # type: ignore[arg-type]
        ours = enrol_local_node(authority, "b", tmp_path / "b")
        yield keeper, PeerKeeper(listener.getsockname(), PeerAdmission(ours, lambda node, serial: True), relayed=False)


def test_a_large_pull_goes_by_four_links(large: tuple[Keeper, PeerKeeper]) -> None:
    keeper, callee = large
    assert push_state(callee, ASK, [memoryview(LARGE)], BytePacer(0)) == len(LARGE)
    assert keeper.links == 1
    assert keeper.sealed.is_set() and keeper.ends == 1 and keeper.memory == LARGE
    keeper.links = 0
    into = [memoryview(bytearray(CHUNK_BYTES + 7)), memoryview(bytearray(len(LARGE) - CHUNK_BYTES - 9))]
    ask = msgspec.structs.replace(ASK, verb="pull", ranges=((0, CHUNK_BYTES + 7), (CHUNK_BYTES + 9, len(LARGE))))
    assert pull_state(callee, ask, into) == len(LARGE) - 2
    assert bytes(into[0]) == LARGE[: CHUNK_BYTES + 7] and bytes(into[1]) == LARGE[CHUNK_BYTES + 9 :]
    assert keeper.links == peer_transport.MOST_LINKS


PULL = msgspec.structs.replace(ASK, verb="pull", ranges=((0, len(LARGE)),))


def test_one_bad_link_of_four(large: tuple[Keeper, PeerKeeper], monkeypatch: pytest.MonkeyPatch) -> None:
    """It breaks as the first of the others to receive: these do its part again."""
    keeper, callee = large
    keeper.memory[:] = LARGE
    real, lock, into = peer_transport.receive_chunk, threading.Lock(), bytearray(len(LARGE))
    broken: list[socket.socket] = []

    def receive_chunk(link: socket.socket, chunk: memoryview, number: int) -> bytes:
        with lock:
            breaks = not broken and threading.current_thread() is not threading.main_thread()
            broken.extend([link] * breaks)
        if breaks:
            link.close()
        return real(link, chunk, number)

    monkeypatch.setattr(peer_transport, "receive_chunk", receive_chunk)
    assert pull_state(callee, PULL, [memoryview(into)]) == len(LARGE)
    assert broken and into == LARGE


def test_a_push_that_breaks_fails_with_a_sentence_and_goes_on_later(
    large: tuple[Keeper, PeerKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, callee = large
    real, left, lock = peer_transport.send_chunk, [6], threading.Lock()

    def send_chunk(link: socket.socket, chunk: memoryview, pacer: BytePacer) -> None:
        with lock:
            left[0] -= 1
            ends = left[0] < 0
        if ends:
            link.close()
        real(link, chunk, pacer)

    monkeypatch.setattr(peer_transport, "send_chunk", send_chunk)
    with pytest.raises(TransportError):
        push_state(callee, ASK, [memoryview(LARGE)], BytePacer(0))
    assert not keeper.sealed.is_set()
    monkeypatch.setattr(peer_transport, "send_chunk", real)
    until(lambda: len(keeper.here()) == 6, "what was sent has arrived")
    assert push_state(callee, ASK, [memoryview(LARGE)], BytePacer(0)) == len(LARGE) - 6 * CHUNK_BYTES
    assert keeper.ends == 1 and bytes(keeper.memory) == LARGE


def test_links_that_cannot_be_had_are_not_missed(large: tuple[Keeper, PeerKeeper]) -> None:
    keeper, callee = large
    keeper.memory[:], into = LARGE, bytearray(len(LARGE))
    keeper.most = 2  # after which certificates count no more
    assert pull_state(callee, PULL, [memoryview(into)]) == len(LARGE)
    assert into == LARGE


def test_links_share_one_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads at once are given what one would be: nobody's bytes are forgotten."""
    slept: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(time, "sleep", slept.append)
    pacer, before = BytePacer(10.0), sys.getswitchinterval()

    def spend() -> None:
        for _ in range(5000):
            pacer.spend_bytes(10)

    threads = [threading.Thread(target=spend) for _ in range(8)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert max(slept) == 40000.0 and len(slept) == len(set(slept))


# --- strangers -------------------------------------------------------------------------------------------------


def test_idle_strangers_of_the_same_host_make_room(
    large: tuple[Keeper, PeerKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as one host may have, and more: a peer gets in at once, not when their time is over."""
    monkeypatch.setattr(peer_server, "_PROVE_S", 200.0)
    keeper, callee = large
    idle = [socket.create_connection(callee.address) for _ in range(3 * peer_server._MOST_STRANGERS)]
    try:
        assert push_state(callee, ASK, [memoryview(LARGE)], BytePacer(0)) == len(LARGE)
        assert bytes(keeper.memory) == LARGE
        assert idle[0].recv(1) == b""  # the oldest was let go
    finally:
        for link in idle:
            link.close()


def test_a_handshake_that_drips_ends_at_its_deadline(
    large: tuple[Keeper, PeerKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte at a time gains no time."""
    monkeypatch.setattr(peer_server, "_PROVE_S", 1.0)
    hello = b"\x16\x03\x01\x02\x00" + b"\x01\x00\x01\xfc" + bytes(508)
    with socket.create_connection(large[1].address, 0.1) as link:
        assert any(_is_closed(link, hello[at : at + 1]) for at in range(len(hello) - 1)), "all of it was waited for"


def _is_closed(link: socket.socket, byte: bytes) -> bool:
    try:
        link.send(byte)
        return link.recv(1) == b""
    except OSError as e:
        return not isinstance(e, TimeoutError)
