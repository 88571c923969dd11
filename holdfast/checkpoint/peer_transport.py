"""Transfers state between keepers: memory ranges in checksummed chunks, paced, and resumed after a broken connection.

On one host the connection is a unix socket, and the kernel tells which user is at the other end. Between hosts it is
TLS, and both sides show a certificate of the job. A connection carries one request after the other: a line of JSON each
way, then chunks, each followed by its xxh3. The sender paces itself. The receiver writes straight into the final
memory. It answers a repeated request with the chunks that it has. Between hosts, a large copy is divided among several
connections, because one core decrypts each of them. Before a push, the keeper asks for one ticket per connection
(relayed_push_tickets.py).
"""

import os
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import xxhash

from holdfast.checkpoint.byte_pacer import PIECE_BYTES, UNPACED, BytePacer
from holdfast.checkpoint.peer_admission import PeerAdmission
from holdfast.checkpoint.relayed_push_tickets import Ticket, show_ticket
from holdfast.checkpoint.tls_relay_client import REVOKED, relayed_link, spares_a_core
from holdfast.decoding import from_json
from holdfast.linux.peer_credentials import read_peer
from holdfast.model.message_bounds import Number
from holdfast.model.state_copy import Address
from holdfast.wire import unix_sockets
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.credentials.mutual_tls import KeyFiles

CHUNK_BYTES = 8 << 20
_LINE_BYTES, _SUM_BYTES = 1 << 20, 8
_SMALL_BYTES = 1 << 30
WAIT_S = 30.0  # for a peer that says nothing
UNIX_BYTES = 1 << 20  # on their way at once: with the kernel's fifth of that both ends wait for one another too often
MOST_LINKS = 4  # of one copy
PART_BYTES = 4 * CHUNK_BYTES  # that a link takes at once
_RELAYED_BYTES = 256 << 20  # a smaller copy is over before relays have started
_ONE_LINK_BYTES_S = 1e9  # a slower pace needs no second link

Span = tuple[Number, Number]
LayoutDigits = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z_]*\Z", max_length=64)]  # it names a file


class PeerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request from one keeper to another."""

    verb: Literal["push", "pull", "tell", "plan"]  # take this state; give me that state; and of a layout the same
    rank: Number
    layout: LayoutDigits
    world: Number = 0
    step: Number = 0
    generation: Number = 0
    floor: Number = -1  # push: a step that must not be lost
    bytes: Number = 0  # push and tell: how many will come
    links: Number = 0  # push: so many tickets are wanted; if any are granted, the state comes by requests for parts
    part: Span | None = None  # push: only these chunks of all
    ranges: tuple[Span, ...] = ()  # pull: of the rank's whole image; of a parity's, where there is a pair
    pair: Span | None = None  # the rank is one of these: its half is laid over the other's


class RefusalCode(StrEnum):
    """Reasons for a refusal that the asking keeper acts on; every other reason is only text for people."""

    OTHER = ""
    NO_LAYOUT = "no layout"  # send the layout, then ask again
    SUPERSEDED = "superseded"  # a later step is wanted by now: this one is not needed any more


class PeerRefusal(NamedTuple):
    text: str  # one sentence
    code: RefusalCode = RefusalCode.OTHER


class PeerReply(msgspec.Struct, frozen=True, kw_only=True):
    error: str = ""
    code: RefusalCode = RefusalCode.OTHER
    chunks: int = 0  # push: up to this one they are here already
    tickets: tuple[Ticket, ...] = ()  # push: for links that processes of the keeper decrypt
    bytes: int = 0  # pull and plan: how many will come


class TransportError(Exception):
    """Says in one sentence what broke between two keepers, or why one of them refused."""

    def __init__(self, text: str, code: RefusalCode = RefusalCode.OTHER) -> None:
        super().__init__(text)
        self.code = code


class LinkError(TransportError):
    """Says in one sentence how the link to another keeper failed; the same request may succeed later."""


class PeerKeeper(NamedTuple):
    """The address of a keeper and, if it is on another host, the guard for mutual authentication."""

    address: Address  # without a port: the path of a unix socket
    guard: PeerAdmission | None = None
    links: int = MOST_LINKS  # at once, for a large copy between hosts
    relayed: bool = spares_a_core()  # a process decrypts each link of a large copy


def cut_range(start: int, end: int) -> list[tuple[int, int]]:
    """Cut a range into chunks; return their starts and ends."""
    return [(at, min(at + CHUNK_BYTES, end)) for at in range(start, end, CHUNK_BYTES)]


def cut_chunks(views: Sequence[memoryview]) -> list[memoryview]:
    """Cut memory ranges into chunks, in the same way on both sides."""
    return [view[start:end] for view in views for start, end in cut_range(0, len(view))]


def push_state(keeper: PeerKeeper, ask: PeerRequest, views: Sequence[memoryview], pacer: BytePacer) -> int:
    """Send state to a keeper that will hold it; return the number of bytes sent. If the keeper grants tickets for its
    relays, use one connection per ticket, otherwise a single connection. Without relays, one core of the keeper
    decrypts everything, so more connections are no faster."""
    all = cut_chunks(views)
    slow = 0 < pacer.bytes_s < _ONE_LINK_BYTES_S
    links = 0 if slow or not _is_relayed(keeper, all) else keeper.links

    def send(link: socket.socket, chunks: Sequence[memoryview]) -> int:
        for chunk in chunks:
            pacer.spend_bytes(len(chunk))
            send_chunk(link, chunk, pacer)
        with pacer.sending():
            _read_reply(link)
        return sum(map(len, chunks))

    def carry(link: socket.socket, part: Part) -> int:
        pacer.spend_bytes(0)  # raises if the copy was given up
        first = _send_request(link, msgspec.structs.replace(ask, part=part)).chunks
        start, end = part or (0, len(all))
        return send(link, all[max(start, first) : end])

    with _connect_keeper(keeper) as link:
        reply = _send_request(link, msgspec.structs.replace(ask, links=links))
        first, tickets = reply.chunks, reply.tickets[:links]
        if not tickets:
            return send(link, all[first:])
    parts = [(first + start, first + end) for start, end in _cut_parts(all[first:])]
    return _PartTransfer(keeper, carry, parts).run_links([partial(_connect_keeper, keeper, one) for one in tickets])


def pull_state(keeper: PeerKeeper, ask: PeerRequest, views: Sequence[memoryview]) -> int:
    """Fetch state from a keeper straight into memory; return the number of bytes received."""
    pieces = [(at, end) for start, stop in ask.ranges for at, end in cut_range(start, stop)]
    all = cut_chunks(views)
    several = [end - at for at, end in pieces] == list(map(len, all))

    def carry(link: socket.socket, part: Part) -> int:
        start, end = part or (0, len(all))
        wanted = all[start:end]
        came = _send_request(link, msgspec.structs.replace(ask, ranges=tuple(pieces[start:end])) if part else ask).bytes
        if came != sum(map(len, wanted)):
            raise TransportError(f"the keeper has {came} bytes instead of the {sum(map(len, wanted))} requested")
        for number, chunk in enumerate(wanted, start):
            receive_chunk(link, chunk, number)
        return came

    parts: Sequence[Part] = _cut_parts(all) if several and keeper.address[1] > 0 and keeper.links > 1 else []
    transfer = _PartTransfer(keeper, carry, parts if len(parts) > 2 else [None])
    return transfer.run_relayed() if _is_relayed(keeper, all) else transfer.run_threads()


def _is_relayed(keeper: PeerKeeper, all: Sequence[memoryview]) -> bool:
    """Return whether to use relays for this copy: it must be encrypted, and large enough to pay for their start."""
    return keeper.relayed and keeper.guard is not None and sum(map(len, all)) >= _RELAYED_BYTES


Part = tuple[int, int] | None  # chunks from..to; None: all
OpenLink = Callable[[], AbstractContextManager[socket.socket]]


def _cut_parts(all: Sequence[memoryview]) -> list[tuple[int, int]]:
    """Cut a copy into parts. The first is a single chunk: in a pull, other connections start only after it."""
    starts, gathered = [0], PART_BYTES
    for number, chunk in enumerate(all):
        if number and gathered >= PART_BYTES:
            starts.append(number)
            gathered = 0
        gathered += len(chunk)
    return list(pairwise([*starts, len(all)]))


class _PartTransfer:
    """Transfers one copy over one or more connections. Each takes the next part left; a broken part is redone."""

    def __init__(self, keeper: PeerKeeper, carry: Callable[[socket.socket, Part], int], parts: Sequence[Part]) -> None:
        self._keeper, self._carry = keeper, carry
        self._own_link = partial(_connect_keeper, keeper)
        self._left, self._count = deque(parts), len(parts)
        self._moved: list[int] = []
        self._failed: list[TransportError] = []

    def run_threads(self) -> int:
        """Transfer all parts; return the bytes moved. The first goes alone, so that the keeper refuses at most once."""
        with _connect_keeper(self._keeper) as link:
            self._moved.append(self._carry(link, self._left.popleft()))
            others = self._start_links([self._own_link] * (self._keeper.links - 1))
            whole = self._drain_parts(link)
            for other in others:
                other.join()
            if whole:
                self._drain_parts(link)  # what another one had to leave
        return self._count_moved()

    def run_relayed(self) -> int:
        """Transfer all parts and return the bytes moved; the first part goes alone, the others go through relays."""
        with _connect_keeper(self._keeper) as link:
            self._moved.append(self._carry(link, self._left.popleft()))
        return self.run_links([partial(_relay_link, self._keeper)] * self._keeper.links)

    def run_links(self, openers: Sequence[OpenLink]) -> int:
        """Transfer the remaining parts over new connections, one per opener; return the number of bytes moved. If some
        of these connections fail, one more connection transfers the parts that they have left."""
        for link in self._start_links(openers):
            link.join()
        if self._left:
            self._run_link(self._own_link)
        return self._count_moved()

    def _count_moved(self) -> int:
        if len(self._moved) < self._count:
            raise next(iter(self._failed), LinkError("a link closed without an answer"))
        return sum(self._moved)

    def _start_links(self, openers: Sequence[OpenLink]) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=self._run_link, args=(open_link,), name="keeper-copy", daemon=True)
            for open_link in openers[: len(self._left)]
        ]
        for thread in threads:
            thread.start()
        return threads

    def _run_link(self, open_link: OpenLink) -> None:
        """Transfer parts over a new connection; if it cannot connect, the other connections transfer its parts."""
        try:
            with open_link() as link:
                self._drain_parts(link)
        except TransportError as e:
            self._failed.append(e)

    def _drain_parts(self, link: socket.socket) -> bool:
        """Transfer parts until none is left. Return False if the connection broke."""
        while True:
            try:
                part = self._left.popleft()
            except IndexError:
                return True
            try:
                self._moved.append(self._carry(link, part))
            except TransportError as e:
                self._failed.append(e)
                self._left.append(part)
                return False


def fetch_content(keeper: PeerKeeper, ask: PeerRequest) -> bytes:
    """Fetch small content from a keeper when its size is not known beforehand."""
    with _connect_keeper(keeper) as link:
        size = _send_request(link, ask).bytes
        if not 0 <= size <= _SMALL_BYTES:
            raise TransportError(f"the keeper announces {size} bytes, above the limit of {_SMALL_BYTES}")
        content = bytearray()
        for number, (start, end) in enumerate(cut_range(0, size)):
            chunk = bytearray(end - start)  # memory for what has come, not for what was promised
            receive_chunk(link, memoryview(chunk), number)
            content += chunk
        return bytes(content)


@lru_cache(maxsize=4)
def _client_tls(keys: KeyFiles) -> ssl.SSLContext:
    return mutual_tls.client_tls(keys, controller=False)


def _connect_keeper(keeper: PeerKeeper, ticket: str = "") -> socket.socket:
    host, port = keeper.address
    try:
        if not port:
            return _connect_unix(Path(host))
        link = socket.create_connection((host, port), timeout=WAIT_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if ticket:
            show_ticket(link, ticket)
        return _wrap_tls(link, keeper.guard) if keeper.guard else link
    except OSError as e:
        raise LinkError(f"the keeper at {host}:{port} cannot be reached: {e}") from None


@contextmanager
def _relay_link(keeper: PeerKeeper) -> Iterator[socket.socket]:
    assert keeper.guard
    try:
        with relayed_link(keeper.address, keeper.guard.keys, keeper.guard.accepts_certificate) as link:
            yield link
    except OSError as e:
        raise LinkError(f"the keeper at {keeper.address[0]}:{keeper.address[1]} cannot be reached: {e}") from None


def _wrap_tls(link: socket.socket, guard: PeerAdmission) -> ssl.SSLSocket:
    secured = _client_tls(guard.keys).wrap_socket(link)
    if not guard.accepts_certificate(secured.getpeercert()):
        secured.close()
        raise PermissionError(REVOKED)
    return secured


def _connect_unix(path: Path) -> socket.socket:
    link = unix_sockets.connect(path)
    if read_peer(link).user != os.getuid():
        link.close()
        raise PermissionError("it belongs to another user")
    link.settimeout(WAIT_S)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BYTES)
    return link


def _send_request(link: socket.socket, ask: PeerRequest) -> PeerReply:
    try:
        link.sendall(msgspec.json.encode(ask) + b"\n")
    except OSError as e:
        raise LinkError(f"the link broke: {e}") from None
    return _read_reply(link)


def _read_reply(link: socket.socket) -> PeerReply:
    try:
        reply = from_json(read_line(link), PeerReply)
    except (OSError, msgspec.DecodeError) as e:
        raise LinkError(f"the keeper's answer was lost: {e}") from None
    if reply.error:
        raise TransportError(f"the keeper refused: {reply.error}", reply.code)
    return reply


def read_line(link: socket.socket) -> bytes:
    """Read one line and not a byte more, because the bytes after it go straight into their target memory."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = link.recv(1)
        if not byte or len(line) > _LINE_BYTES:
            raise LinkError("the link ended in the middle of a line")
        line += byte
    return bytes(line)


def send_chunk(link: socket.socket, chunk: memoryview, pacer: BytePacer = UNPACED) -> None:
    summed, start = xxhash.xxh3_64(), 0
    try:
        while start < len(chunk):
            count = pacer.admit_piece(link, len(chunk) - start)
            with pacer.sending():
                piece = chunk[start : start + count]
                summed.update(piece)
                link.sendall(piece)
            start += count
        link.sendall(summed.digest())
    except OSError as e:
        raise LinkError(f"the link broke while sending: {e}") from None


def receive_chunk(link: socket.socket, chunk: memoryview, number: int) -> bytes:
    """Receive a chunk, verify its checksum and return the checksum. Raises TransportError on a mismatch."""
    summed, digest = xxhash.xxh3_64(), bytearray(_SUM_BYTES)
    for part in (chunk, memoryview(digest)):
        at = 0
        while at < len(part):
            try:
                count = link.recv_into(part[at : at + PIECE_BYTES])
            except OSError as e:
                raise LinkError(f"the link broke while receiving: {e}") from None
            if not count:
                raise LinkError("the link ended in the middle of a chunk")
            if part is chunk:
                summed.update(part[at : at + count])
            at += count
    if summed.digest() != bytes(digest):
        raise TransportError(f"chunk {number} was damaged in transit")
    return bytes(digest)
