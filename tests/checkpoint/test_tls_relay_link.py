"""Large pulls between hosts by relays: whole, without leftovers, and made up for where a relay fails."""

import socket
import threading

import psutil
import pytest

from holdfast.checkpoint import peer_transport
from holdfast.checkpoint.peer_transport import PeerKeeper, pull_state
from holdfast.checkpoint.tls_relay_link import REVOKED, relayed_link
from tests.checkpoint import test_peer_transport
from tests.checkpoint.test_peer_transport import LARGE, PULL, Keeper

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
            return "holdfast.checkpoint.tls_relay" in child.cmdline()
        except psutil.NoSuchProcess:
            return False

    return [child for child in psutil.Process().children() if is_relay(child)]


def filled(keeper: Keeper) -> Keeper:
    keeper.memory[:] = LARGE
    return keeper


def test_a_large_pull_goes_by_relays(large: tuple[Keeper, PeerKeeper]) -> None:
    keeper, callee = filled(large[0]), large[1]
    assert pull_large(callee)
    assert keeper.links == 1 + peer_transport.MOST_LINKS


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
    keeper.refused_links = range(2, 2 + peer_transport.MOST_LINKS)
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
