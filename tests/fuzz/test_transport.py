"""The keeper's socket and the fork server's, spoken to by strangers: they survive, and answer the next one."""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.checkpoint import peer_transport
from holdfast.checkpoint.byte_pacer import BytePacer
from holdfast.checkpoint.peer_server import PeerServer, PushTarget
from holdfast.checkpoint.peer_transport import (
    PeerKeeper,
    PeerRefusal,
    PeerReply,
    PeerRequest,
    TransportError,
    fetch_content,
    pull_state,
    push_state,
)
from holdfast.linux.preimported_fork import Program
from holdfast.wire import program_fork_server, unix_sockets
from tests.fuzz.making import JSON, hostile, mutated, narrow, values

MEMORY = 4096
_PUSH = PeerRequest(verb="push", rank=0, layout="ab", bytes=MEMORY)
_ASKS = values(PeerRequest, JSON).map(lambda ask: msgspec.json.encode(ask) + b"\n")
_REPLIES = values(PeerReply, JSON).map(lambda reply: msgspec.json.encode(reply) + b"\n")


@pytest.mark.parametrize("layout", ["../x", "\u0435" * 64, "a\n", "a" * 65])
def test_the_digest_of_a_layout_can_be_a_files_name(layout: str) -> None:
    asked = msgspec.json.encode(_PUSH).replace(b'"ab"', msgspec.json.encode(layout))
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(asked, type=PeerRequest)


class Keeper:
    """A keeper over plain memory, and what became of its threads."""

    def __init__(self, folder: Path) -> None:
        self.memory = bytearray(MEMORY)
        self.crashed: list[BaseException] = []
        self.callee = PeerKeeper((str(folder / "k.sock"), 0))
        self.listener = unix_sockets.listen(folder / "k.sock")
        PeerServer(self.listener, None, self.take, self.give).start()

    def take(self, ask: PeerRequest, node: str) -> PushTarget | PeerRefusal:
        return PushTarget([memoryview(self.memory)], 0, lambda: None)

    def give(self, ask: PeerRequest) -> tuple[list[memoryview], Callable[[], None]] | PeerRefusal:
        if any(not 0 <= start <= end <= MEMORY for start, end in ask.ranges):
            return PeerRefusal("there is no such range")
        return [memoryview(self.memory)[start:end] for start, end in ask.ranges], lambda: None

    def answers(self) -> None:
        """A good request, both ways."""
        content = os.urandom(MEMORY)
        push_state(self.callee, _PUSH, [memoryview(content)], BytePacer(0))
        back = bytearray(MEMORY)
        ask = PeerRequest(verb="pull", rank=0, layout="ab", ranges=((0, MEMORY),))
        assert pull_state(self.callee, ask, [memoryview(back)]) == MEMORY and bytes(back) == content


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    before, found = threading.excepthook, Keeper(tmp_path_factory.mktemp("keeper"))
    threading.excepthook = lambda args: found.crashed.append(args.exc_value or AssertionError("it says nothing"))
    yield found
    threading.excepthook = before
    found.listener.close()


def _said(keeper: Keeper, words: list[bytes], *, end: bool) -> None:
    with unix_sockets.connect(Path(keeper.callee.address[0])) as link, contextlib.suppress(OSError):
        link.settimeout(10)
        for word in words:
            link.sendall(word)
        if end:
            link.shutdown(socket.SHUT_WR)
            while link.recv(1 << 16):
                pass


@given(words=st.lists(hostile(_ASKS), min_size=1, max_size=4), end=st.booleans())
@example(words=[b'{"verb":"\xff"}\n'], end=True)
@example(words=[b'{"verb":' + b"[" * 9_000 + b"\n"], end=True)
@example(words=[b'{"verb":"push","rank":' + b"9" * 5000 + b"}\n"], end=True)
@example(words=[msgspec.json.encode(_PUSH) + b"\n", b"x" * (MEMORY + 8)], end=True)
def test_a_keeper_outlives_whoever_calls(words: list[bytes], end: bool, keeper: Keeper) -> None:
    _said(keeper, words, end=end)
    keeper.answers()
    assert not keeper.crashed, keeper.crashed.pop()


@given(answer=hostile(_REPLIES))
@example(answer=b'{"bytes":-1}\n')
@example(answer=b'{"bytes":1073741824}\n')
@example(answer=b'{"bytes":9223372036854775807}\n')
@example(answer=b'{"chunks":-9}\n')
@example(answer=b'{"error":"\xff"}\n')
def test_whoever_asks_outlives_the_answer(answer: bytes) -> None:
    """A keeper of another host is no more to be believed than a stranger, once its machine is bad."""
    for ask in (_fetched, _pulled, _pushed):
        ours, theirs = socket.socketpair()
        with theirs, pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer_transport, "_connect_keeper", lambda keeper, ours=ours: ours)
            ours.settimeout(5)
            theirs.sendall(answer[:100_000])
            theirs.shutdown(socket.SHUT_WR)
            narrow(ask, TransportError)


_NOBODY = PeerKeeper(("", 0))


def _fetched() -> object:
    return fetch_content(_NOBODY, PeerRequest(verb="plan", rank=0, layout="ab"))


def _pulled() -> object:
    return pull_state(_NOBODY, PeerRequest(verb="pull", rank=0, layout="ab"), [memoryview(bytearray(16))])


def _pushed() -> object:
    return push_state(_NOBODY, _PUSH, [memoryview(bytearray(16))], BytePacer(0))


# --- the fork server -------------------------------------------------------------------------------------------

_PROGRAMS = values(Program).map(msgspec.msgpack.encode)
_REQUESTS = _PROGRAMS.map(lambda packet: struct.pack("!I", len(packet)) + packet + b"!")


@given(request=st.one_of(hostile(_REQUESTS), mutated(_PROGRAMS).map(lambda p: struct.pack("!I", len(p)) + p + b"!")))
@example(request=b"")
@example(request=b"\xff\xff\xff\xff")
@example(request=b"\0\0\0\x04\x81\xa1\xff\xff!")
@example(request=struct.pack("!I", 9_002) + b"\x81\xa1x"[:2] + b"\x91" * 9_000 + b"!")
def test_a_request_to_the_fork_server(request: bytes) -> None:
    """Nothing is forked without files, so every request is answered by a sentence."""
    ours, theirs = socket.socketpair()
    with ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        ours.sendall(request[:150_000])
        ours.shutdown(socket.SHUT_WR)
        program_fork_server._serve_client(theirs, ())
        ours.settimeout(10)
        with contextlib.suppress(ConnectionResetError):  # it did not read all of it
            said = b"".join(iter(lambda: ours.recv(1 << 16), b""))
            assert msgspec.msgpack.decode(said[1:], type=program_fork_server.ForkAnswer).error
