"""State between keepers: ranges of memory in checked chunks, paced, and resumed where a link broke.

On one host the link is a unix socket, and the kernel says whose process is at the other end; between hosts it is TLS,
and both sides show a certificate of the job.

One request per connection: a line of JSON each way, then chunks, each followed by its xxh3. Whoever sends paces itself.
Whoever receives writes straight into the memory the state will live in, and says how many chunks it has if asked again.
"""

import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import xxhash

from holdfast.core.decoding import from_json
from holdfast.linux.peer_credentials import peer_of
from holdfast.model.copy import Address
from holdfast.wire import identity, unixpath
from holdfast.wire.identity import Keys

CHUNK_BYTES = 8 << 20
_LINE_BYTES = 1 << 20
_SUM_BYTES = 8
_SMALL_BYTES = 1 << 30
_WAIT_S = 30.0  # for a peer that says nothing
_PROVE_S = 5.0  # for one that has not proved itself, or not said what it wants
_MOST_LINKS = 256
_MOST_STRANGERS = 8  # links from one host that have not proved themselves
_UNIX_BYTES = 1 << 20  # on their way at once: with the kernel's fifth of that both ends wait for one another too often
_BREATH_S = 0.1  # where there are no more files to be had


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a connection is for."""

    verb: Literal["push", "pull", "tell", "plan"]  # take this state; give me that state; and of a layout the same
    rank: int
    layout: str
    world: int = 0
    step: int = 0
    generation: int = 0
    floor: int = -1  # push: a step that must not be lost
    bytes: int = 0  # push and tell: how many will come
    ranges: tuple[tuple[int, int], ...] = ()  # pull: of the rank's whole image; of a parity's, where there is a pair
    pair: tuple[int, int] | None = None  # the rank is one of these: its half is laid over the other's


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    error: str = ""
    chunks: int = 0  # push: that many are here already
    bytes: int = 0  # pull and plan: how many will come


class TransportError(Exception):
    """One sentence: what broke between two keepers."""


class Callee(NamedTuple):
    """A keeper, and what proves us and it to each other if it is on another host."""

    address: Address  # without a port: the path of a unix socket
    guard: "Guard | None" = None


def cuts(start: int, end: int) -> list[tuple[int, int]]:
    """Where a range is cut into chunks."""
    return [(at, min(at + CHUNK_BYTES, end)) for at in range(start, end, CHUNK_BYTES)]


def chunks(views: Sequence[memoryview]) -> list[memoryview]:
    """The ranges cut into pieces that both sides cut alike."""
    return [view[start:end] for view in views for start, end in cuts(0, len(view))]


class Pacer:
    """Keeps an average rate; a pause of any length earns no more than a second's worth."""

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s  # 0: as fast as it goes
        self._free_at = time.monotonic()

    def spend(self, count: int) -> None:
        if self.bytes_s <= 0:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now - 1.0) + count / self.bytes_s
        if self._free_at > now:
            time.sleep(self._free_at - now)


def push(keeper: Callee, ask: Ask, views: Sequence[memoryview], pacer: Pacer) -> int:
    """Send state to a keeper that will hold it; returns the bytes that were sent."""
    with _connect(keeper) as link:
        reply = _ask(link, ask)
        sent = 0
        for chunk in chunks(views)[reply.chunks :]:
            pacer.spend(len(chunk))
            _send_chunk(link, chunk)
            sent += len(chunk)
        _read_reply(link)
        return sent


def pull(keeper: Callee, ask: Ask, views: Sequence[memoryview]) -> int:
    """Fetch state from a keeper that holds it, straight into memory; returns the bytes that came."""
    with _connect(keeper) as link:
        came = _ask(link, ask).bytes
        if came != sum(map(len, views)):
            raise TransportError(f"the keeper has {came} bytes where {sum(map(len, views))} were asked for")
        for number, chunk in enumerate(chunks(views)):
            _receive_chunk(link, chunk, number)
        return came


def fetch(keeper: Callee, ask: Ask) -> bytes:
    """What a keeper has, where its size is not known beforehand; for what is small."""
    with _connect(keeper) as link:
        size = _ask(link, ask).bytes
        if not 0 <= size <= _SMALL_BYTES:
            raise TransportError(f"the keeper says that {size} bytes come, where {_SMALL_BYTES} are the most")
        content = bytearray()
        for number, (start, end) in enumerate(cuts(0, size)):  # memory for what has come, not for what was promised
            chunk = bytearray(end - start)
            _receive_chunk(link, memoryview(chunk), number)
            content += chunk
        return bytes(content)


class Holding(msgspec.Struct):
    """Where pushed state goes: its memory, how much is there, and what to do when all is."""

    views: list[memoryview]
    done: int  # chunks
    finish: Callable[[], None]  # raises a TransportError if it is not wanted any more
    mix: Callable[[int, memoryview, bytes], None] | None = None  # takes and counts chunks, which are not to lie there


class Guard(NamedTuple):
    """Who may have our state: nodes of the job whose certificate still counts."""

    keys: Keys
    is_peer: Callable[[str], bool]  # by its serial
    run_id: str = ""  # of this run; "": whichever it is
    is_gone: Callable[[str], bool] = lambda node: False  # whether a node has left, whatever certificate it has now

    def admits(self, shown: dict[str, Any] | None) -> bool:
        """Whether this is the certificate of a node of this run: the user's authority may have signed others."""
        ours = not self.run_id or identity.run_of(shown) in ("", self.run_id)
        node = identity.node_of(shown)
        return ours and bool(node) and not self.is_gone(node) and self.is_peer(identity.serial_of(shown))


class Serving:
    """The listening side of a keeper: a thread per link, few links; strangers get little of our time and none of our
    memory."""

    def __init__(
        self,
        listener: socket.socket,
        guard: Guard | None,
        take: Callable[[Ask], Holding | str],
        give: Callable[[Ask], tuple[Sequence[memoryview], Callable[[], None]] | str],
    ) -> None:
        """`guard`: of a listener that other hosts reach; without one it is a unix socket."""
        self._listener = listener
        self._guard = guard
        self._context = identity.accepting(guard.keys, strangers=False) if guard else None
        self._take = take
        self._give = give
        self._lock = threading.Lock()
        self._links = 0
        self._strangers: dict[str, int] = {}  # by host

    def start(self) -> None:
        threading.Thread(target=self._accept, name="keeper-links", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                link, address = self._listener.accept()
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED):
                    time.sleep(_BREATH_S)
                    continue
                return  # closed: the keeper ends
            host = str(address[0]) if address else ""
            if not self._enters(host):
                link.close()
                continue
            try:
                threading.Thread(target=self._attend, args=(link, host), name="keeper-link", daemon=True).start()
            except RuntimeError:  # no more threads
                link.close()
                self._known(host)
                self._leaves()

    def _enters(self, host: str) -> bool:
        """Whether there is room for one more that nobody knows yet."""
        with self._lock:
            if self._links >= _MOST_LINKS or self._strangers.get(host, 0) >= _MOST_STRANGERS:
                return False
            self._links += 1
            self._strangers[host] = self._strangers.get(host, 0) + 1
            return True

    def _known(self, host: str) -> None:
        """It has proved itself, or is gone."""
        with self._lock:
            self._strangers[host] -= 1
            if not self._strangers[host]:
                del self._strangers[host]

    def _leaves(self) -> None:
        with self._lock:
            self._links -= 1

    def _attend(self, link: socket.socket, host: str) -> None:
        proved: socket.socket | None = None
        try:
            with suppress(OSError):
                link.settimeout(_PROVE_S)
                proved = self._proved(link)
        finally:
            self._known(host)
        try:
            if proved is not None:
                self._serve(proved)
        finally:
            (proved or link).close()
            self._leaves()

    def _proved(self, link: socket.socket) -> socket.socket | None:
        """The link, if it is from somebody who may have our state."""
        if self._guard is None or self._context is None:
            if link.family == socket.AF_UNIX and peer_of(link).user != os.getuid():
                return None
            if link.family == socket.AF_UNIX:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BYTES)
            return link
        secured = self._context.wrap_socket(link, server_side=True)
        if self._guard.admits(secured.getpeercert()):
            return secured
        secured.close()
        return None

    def _serve(self, link: socket.socket) -> None:
        with suppress(OSError, TransportError):
            try:
                ask = from_json(_read_line(link), Ask)
            except msgspec.DecodeError:
                _reply(link, Reply(error="not a request of this version of holdfast"))
                return
            link.settimeout(_WAIT_S)
            if ask.verb in ("push", "tell"):
                self._receive(link, ask)
            else:
                self._send(link, ask)

    def _receive(self, link: socket.socket, ask: Ask) -> None:
        holding = self._take(ask)
        if isinstance(holding, str):
            _reply(link, Reply(error=holding))
            return
        first = holding.done  # fixed: a link that broke may still have a chunk to deliver
        _reply(link, Reply(chunks=first))
        coming = chunks(holding.views)[first:]
        aside = memoryview(bytearray(max(map(len, coming), default=0) if holding.mix else 0))
        for number, chunk in enumerate(coming, first):
            if holding.mix is None:
                _receive_chunk(link, chunk, number)
                holding.done = max(holding.done, number + 1)
            else:
                apart = aside[: len(chunk)]
                holding.mix(number, apart, _receive_chunk(link, apart, number))
        try:
            holding.finish()
        except TransportError as e:
            _reply(link, Reply(error=str(e)))
        else:
            _reply(link, Reply(chunks=holding.done))

    def _send(self, link: socket.socket, ask: Ask) -> None:
        given = self._give(ask)
        if isinstance(given, str):
            _reply(link, Reply(error=given))
            return
        views, release = given
        try:
            _reply(link, Reply(bytes=sum(map(len, views))))
            for chunk in chunks(views):
                _send_chunk(link, chunk)
        finally:
            release()


@lru_cache(maxsize=4)
def _calling(keys: Keys) -> ssl.SSLContext:
    return identity.calling(keys, controller=False)


def _connect(keeper: Callee) -> socket.socket:
    host, port = keeper.address
    try:
        if not port:
            return _to_own(Path(host))
        link = socket.create_connection((host, port), timeout=_WAIT_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _proving(link, keeper.guard) if keeper.guard else link
    except OSError as e:
        raise TransportError(f"the keeper at {host}:{port} cannot be reached: {e}") from None


def _proving(link: socket.socket, guard: Guard) -> ssl.SSLSocket:
    secured = _calling(guard.keys).wrap_socket(link)
    if not guard.admits(secured.getpeercert()):
        secured.close()
        raise PermissionError("its certificate counts no more")
    return secured


def _to_own(path: Path) -> socket.socket:
    link = unixpath.connect(path)
    if peer_of(link).user != os.getuid():
        link.close()
        raise PermissionError("it is another user's")
    link.settimeout(_WAIT_S)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BYTES)
    return link


def _ask(link: socket.socket, ask: Ask) -> Reply:
    try:
        link.sendall(msgspec.json.encode(ask) + b"\n")
    except OSError as e:
        raise TransportError(f"the link broke: {e}") from None
    return _read_reply(link)


def _reply(link: socket.socket, reply: Reply) -> None:
    link.sendall(msgspec.json.encode(reply) + b"\n")


def _read_reply(link: socket.socket) -> Reply:
    try:
        reply = from_json(_read_line(link), Reply)
    except (OSError, msgspec.DecodeError) as e:
        raise TransportError(f"the keeper's answer was lost: {e}") from None
    if reply.error:
        raise TransportError(f"the keeper refused: {reply.error}")
    return reply


def _read_line(link: socket.socket) -> bytes:
    """One line and not a byte more: what follows it goes straight into its place."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = link.recv(1)
        if not byte or len(line) > _LINE_BYTES:
            raise TransportError("the link ended in the middle of a line")
        line += byte
    return bytes(line)


def _send_chunk(link: socket.socket, chunk: memoryview) -> None:
    try:
        link.sendall(chunk)
        link.sendall(xxhash.xxh3_64_digest(chunk))
    except OSError as e:
        raise TransportError(f"the link broke while sending: {e}") from None


def _receive_chunk(link: socket.socket, chunk: memoryview, number: int) -> bytes:
    """Its checksum, which has been compared."""
    digest = bytearray(_SUM_BYTES)
    for part in (chunk, memoryview(digest)):
        at = 0
        while at < len(part):
            try:
                count = link.recv_into(part[at:])
            except OSError as e:
                raise TransportError(f"the link broke while receiving: {e}") from None
            if not count:
                raise TransportError("the link ended in the middle of a chunk")
            at += count
    if xxhash.xxh3_64_digest(chunk) != bytes(digest):
        raise TransportError(f"chunk {number} was damaged on its way")
    return bytes(digest)
