"""A keeper's answers: sent at once, and refusals of what nobody can ask for."""

import socket

import msgspec
import pytest

from holdfast.checkpoint import peer_server, peer_transport
from holdfast.checkpoint.peer_transport import PeerKeeper, TransportError, pull_state
from tests.checkpoint import test_peer_transport
from tests.checkpoint.test_peer_transport import ASK, PULL, Keeper

authority, large = test_peer_transport.authority, test_peer_transport.large  # fixtures


def test_a_keeper_holds_no_bytes_back(large: tuple[Keeper, PeerKeeper], monkeypatch: pytest.MonkeyPatch) -> None:
    """By Nagle's algorithm the last bytes of each part would wait for an acknowledgement, up to 40 ms."""
    found = list[int]()

    def send_chunk(link: socket.socket, chunk: memoryview) -> None:
        found.append(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        peer_transport.send_chunk(link, chunk)

    monkeypatch.setattr(peer_server, "send_chunk", send_chunk)
    pull_state(large[1], msgspec.structs.replace(PULL, ranges=((0, 9),)), [memoryview(bytearray(9))])
    assert found and all(found)


@pytest.mark.parametrize("part", [(-1, 2), (2, 1), (0, 99)])
def test_parts_that_are_none(large: tuple[Keeper, PeerKeeper], part: tuple[int, int]) -> None:
    with (
        peer_transport._connect_keeper(large[1]) as link,
        pytest.raises(TransportError, match=rf" {part[0]} to {part[1]} of \d+ "),
    ):
        peer_transport._send_request(link, msgspec.structs.replace(ASK, part=part))
