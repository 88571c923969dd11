"""State between keepers: whole, checked, resumed, and only for those who know the token."""

import os
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import xxhash

from holdfast.checkpoint import transport
from holdfast.checkpoint.transport import CHUNK_BYTES, Ask, Holding, Pacer, Serving, TransportError, pull, push

ASK = Ask(token="t", verb="push", rank=1, world=2, step=7, generation=3, layout="ab")
STATE = os.urandom(2 * CHUNK_BYTES + 12345)


class Keeper:
    """A keeper's two answers, over plain memory."""

    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)
        self.sealed = threading.Event()
        self.asked: list[Ask] = []
        self.holding = Holding([memoryview(self.memory)], 0, self.sealed.set)
        self.refuse = ""

    def take(self, ask: Ask) -> Holding | str:
        self.asked.append(ask)
        return self.refuse or self.holding

    def give(self, ask: Ask) -> tuple[list[memoryview], object] | str:
        self.asked.append(ask)
        return self.refuse or ([memoryview(self.memory)[a:b] for a, b in ask.ranges], lambda: None)


@pytest.fixture
def keeper() -> Keeper:
    return Keeper(len(STATE))


@pytest.fixture
def address(keeper: Keeper) -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    Serving(listener, "t", keeper.take, keeper.give).start()  # type: ignore[arg-type]
    yield listener.getsockname()
    listener.close()


def test_push_and_pull_are_exact(keeper: Keeper, address: tuple[str, int]) -> None:
    assert push(address, ASK, [memoryview(STATE)], Pacer(0)) == len(STATE)
    assert keeper.sealed.wait(10) and bytes(keeper.memory) == STATE
    ranges = ((5, CHUNK_BYTES + 9), (2 * CHUNK_BYTES, len(STATE)))
    into = [memoryview(bytearray(end - start)) for start, end in ranges]
    pull(address, msgspec.structs.replace(ASK, verb="pull", ranges=ranges), into)
    assert [bytes(view) for view in into] == [STATE[start:end] for start, end in ranges]


def test_a_push_goes_on_where_it_broke(keeper: Keeper, address: tuple[str, int]) -> None:
    keeper.memory[: 2 * CHUNK_BYTES] = STATE[: 2 * CHUNK_BYTES]
    keeper.holding.done = 2
    assert push(address, ASK, [memoryview(STATE)], Pacer(0)) == 12345
    assert keeper.sealed.wait(10) and bytes(keeper.memory) == STATE


def test_what_a_broken_link_delivers_late_does_no_harm(keeper: Keeper, address: tuple[str, int]) -> None:
    """A second link has been told where to go on; then the first, thought dead, brings one chunk more."""
    with socket.create_connection(address) as link:
        link.sendall(msgspec.json.encode(ASK) + b"\n")
        transport._read_reply(link)
        keeper.memory[:CHUNK_BYTES] = STATE[:CHUNK_BYTES]  # by the other link
        keeper.holding.done = 1
        for chunk in transport.chunks([memoryview(STATE)]):
            transport._send_chunk(link, chunk)
        transport._read_reply(link)
    assert keeper.sealed.wait(10) and bytes(keeper.memory) == STATE


def test_a_stranger_is_refused(keeper: Keeper, address: tuple[str, int]) -> None:
    with pytest.raises(TransportError, match="token"):
        push(address, msgspec.structs.replace(ASK, token="guess"), [memoryview(STATE)], Pacer(0))
    assert not keeper.asked


def test_a_refusal_is_told(keeper: Keeper, address: tuple[str, int]) -> None:
    keeper.refuse = "generation 3 is over"
    with pytest.raises(TransportError, match="generation 3 is over"):
        push(address, ASK, [memoryview(STATE)], Pacer(0))


def test_damage_on_the_way_is_seen(keeper: Keeper, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(link: socket.socket, chunk: memoryview) -> None:
        whole = bytearray(chunk)
        digest = xxhash.xxh3_64_digest(whole)
        whole[len(whole) // 2] ^= 1
        try:
            link.sendall(whole + digest)
        except OSError as e:
            raise TransportError(str(e)) from None

    monkeypatch.setattr(transport, "_send_chunk", damaged)
    with pytest.raises(TransportError):
        push(address, ASK, [memoryview(STATE)], Pacer(0))
    assert not keeper.sealed.is_set()
    assert keeper.holding.done == 0


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(TransportError, match="cannot be reached"):
        push(address, ASK, [memoryview(STATE)], Pacer(0))


def test_the_pacer_keeps_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda s: clock.__setitem__(0, clock[0] + s))
    pacer = Pacer(10.0)
    for _ in range(50):
        pacer.spend(10)
    assert 48.0 <= clock[0] - 100.0 <= 50.0
