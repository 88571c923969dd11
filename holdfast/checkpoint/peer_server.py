"""The server side of a keeper: accepts connections of other keepers, answers requests and stores pushed state."""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import msgspec

from holdfast.checkpoint.peer_admission import PeerAdmission
from holdfast.checkpoint.peer_transport import (
    UNIX_BYTES,
    WAIT_S,
    PeerRefusal,
    PeerReply,
    PeerRequest,
    TransportError,
    cut_chunks,
    read_line,
    receive_chunk,
    send_chunk,
)
from holdfast.checkpoint.relayed_push_tickets import RelayTickets
from holdfast.checkpoint.tls_relay_client import most_relays, relayed_link
from holdfast.decoding import from_json
from holdfast.linux.peer_credentials import read_peer
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.request_rates import RequestRates

_PROVE_S = 5.0  # for one that has not proved itself, or not said what it wants
_MOST_LINKS = 256
_MOST_STRANGERS = 16  # links from one host that have not proved themselves
_LEAVING = 64  # on top of the most: sent away, and not gone yet
_BREATH_S = 0.1  # where there are no more files to be had, and between looks at who may ask again
_A_SECOND, _AT_ONCE = 1000.0, 5000.0  # requests of one node of another host; it is slowed beyond, and nobody else


class PushTarget(msgspec.Struct):
    """The target of pushed state: its memory, the chunks received so far, and a callback for when it is complete."""

    views: list[memoryview]
    done: int  # chunks
    finish: Callable[[], None]  # raises a TransportError if it is not wanted any more
    mix: Callable[[int, memoryview, bytes], None] | None = None  # takes and counts chunks, which are not to lie there
    beyond: set[int] = msgspec.field(default_factory=set)  # that are here, too: a broken link may bring some late
    finished: bool = False
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    given_up: bool = False
    receiving: list[socket.socket] = msgspec.field(default_factory=list)  # links on which a chunk comes in now
    gate: threading.Condition = msgspec.field(
        default_factory=threading.Condition
    )  # of these two; nobody calls out in it

    @contextmanager
    def admit_chunk(self, link: socket.socket) -> Iterator[None]:
        """Return a context in which the caller receives one chunk. Raises TransportError if this copy was given up."""
        with self.gate:
            if self.given_up:
                raise TransportError("this copy was given up for another one")
            self.receiving.append(link)
        try:
            yield
        finally:
            with self.gate:
                self.receiving.remove(link)
                self.gate.notify_all()

    def give_up(self) -> None:
        """Refuse all further chunks and shut down the connections that are receiving one."""
        with self.gate:
            self.given_up = True
            for link in self.receiving:
                with suppress(OSError):
                    socket.socket.shutdown(link, socket.SHUT_RDWR)  # TLS's own would let its reader go on unencrypted

    def is_quiet(self, timeout_s: float) -> bool:
        """Wait until no chunk is being received. Return False if that takes longer than `timeout_s`."""
        with self.gate:
            return self.gate.wait_for(lambda: not self.receiving, timeout_s)

    def on_chunk(self, number: int) -> None:
        with self.lock:
            self.beyond.add(number)
            while self.done in self.beyond:
                self.done += 1

    def first_missing(self, count: int) -> int:
        """Return the first of `count` chunks that has not arrived, or `count` if all have."""
        with self.lock:
            return min(self.done, count)

    def finish_once(self) -> None:
        """Call `finish` once, even if several connections call this. The others wait until `finish` has returned."""
        with self.lock:
            if not self.finished:
                self.finish()
                self.finished = True


GivenState = tuple[Sequence[memoryview], Callable[[], None]]  # and what is to be called once it was read


class PeerShelf(Protocol):
    """The methods of a keeper that its server calls, from the connections' threads, when other keepers push or pull."""

    def receive_push(self, ask: PeerRequest, node: str = "") -> PushTarget | PeerRefusal: ...
    def serve_pull(self, ask: PeerRequest) -> GivenState | PeerRefusal: ...


class UnprovenLink:
    """A connection whose other end has not been authenticated yet."""

    def __init__(self, link: socket.socket, host: str) -> None:
        self.link, self.host = link, host
        self.node = ""  # by its certificate, once it has proved itself; "": a node of this host
        self.certificate: dict[str, Any] = {}
        self.unwanted = False
        self.spoke = False  # it has sent something, as an honest keeper does at once


class PeerServer:
    """A keeper's server, with one thread per connection; unauthenticated connections get little time and no memory."""

    def __init__(
        self,
        listener: socket.socket,
        guard: PeerAdmission | None,
        take: Callable[[PeerRequest, str], PushTarget | PeerRefusal],
        give: Callable[[PeerRequest], GivenState | PeerRefusal],
        relays: int | None = None,
    ) -> None:
        """`guard` authenticates peers on other hosts; it is None for a unix socket. `take` answers a push. Its second
        argument is the name of the pushing node, or "" for a node on this host. `give` answers a pull. `relays` limits
        the number of relay processes; None derives the limit from the number of cores."""
        self._listener = listener
        self._guard = guard
        self._context = mutual_tls.server_tls(guard.keys, strangers=False) if guard else None
        self._take = take
        self._give = give
        self._tickets = RelayTickets(most_relays() if relays is None else relays)
        self._lock = threading.Lock()
        self._links = 0
        self._strangers: dict[UnprovenLink, None] = {}  # the oldest first
        self._known_hosts: set[str] = set()  # from which somebody has proved itself: they go last
        self._rates = RequestRates(_A_SECOND, _AT_ONCE)

    def start(self) -> None:
        threading.Thread(target=self._accept_links, name="keeper-links", daemon=True).start()

    def _accept_links(self) -> None:
        while True:
            try:
                link, address = self._listener.accept()
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED):
                    time.sleep(_BREATH_S)
                    continue
                return  # closed: the keeper ends
            one = UnprovenLink(link, str(address[0]) if address else "")
            if not self._make_room_for(one):
                link.close()
                continue
            try:
                threading.Thread(target=self._serve_link, args=(one,), name="keeper-link", daemon=True).start()
            except RuntimeError:  # no more threads
                link.close()
                self._leave_strangers(one)
                self._forget_link()

    def _make_room_for(self, one: UnprovenLink) -> bool:
        """Admit a new unauthenticated connection; return False if there is no room for it. A limit is needed because
        connections are cheap to open. If the host has too many, one of its own is dropped. If there are too many in
        total, one of any host is dropped, but of a host that has authenticated before only if there is no other. Of
        these, the oldest connection that has sent nothing goes first."""
        with self._lock:
            beside = [other for other in self._strangers if other.host == one.host]
            full = self._links >= _MOST_LINKS + _LEAVING
            if full or (self._links >= _MOST_LINKS and not self._strangers):
                return False
            if len(beside) >= _MOST_STRANGERS:
                self._drop_link(min(beside, key=lambda other: other.spoke))
            elif self._links >= _MOST_LINKS:
                self._drop_link(min(self._strangers, key=lambda other: (other.host in self._known_hosts, other.spoke)))
            self._links += 1
            self._strangers[one] = None
            return True

    def _drop_link(self, one: UnprovenLink) -> None:
        """Shut the connection down, so that its thread wakes up and ends."""
        one.unwanted = True
        self._strangers.pop(one, None)
        with suppress(OSError):
            socket.socket.shutdown(one.link, socket.SHUT_RDWR)  # not as TLS does it: that is its thread's alone

    def _leave_strangers(self, one: UnprovenLink) -> bool:
        """Record that a connection is authenticated: it is dropped no longer. Return False if it already has been."""
        with self._lock:
            self._strangers.pop(one, None)
            return not one.unwanted

    def _forget_link(self) -> None:
        with self._lock:
            self._links -= 1

    def _serve_link(self, one: UnprovenLink) -> None:
        proved, owner, until = False, "", time.monotonic() + _PROVE_S
        try:
            with suppress(OSError):
                one.link.settimeout(_PROVE_S)
                if one.link.family != socket.AF_UNIX:  # or the last bytes of each part wait for word of those before
                    one.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                one.spoke = self._guard is None or bool(one.link.recv(1, socket.MSG_PEEK))
                owner = self._tickets.redeem(one.link) if self._guard else ""
                one.link.settimeout(max(until - time.monotonic(), _BREATH_S))
                proved = bool(owner) or self._prove_peer(one)
        finally:
            wanted = self._leave_strangers(one)
        try:
            if owner:
                self._serve_relayed(one, owner)
            elif proved and wanted:
                self._serve_requests(one)
        finally:
            one.link.close()
            self._forget_link()

    def _serve_relayed(self, one: UnprovenLink, owner: str) -> None:
        """Serve a connection that has shown a ticket of the node `owner`. A relay decrypts the connection, and the
        other end must show the certificate of `owner`."""
        assert self._guard
        guard = self._guard

        def accepts(shown: dict[str, Any]) -> bool:
            one.node, one.certificate = mutual_tls.certificate_node(shown), shown
            return one.node == owner and guard.accepts_caller(shown)

        try:
            with suppress(OSError), relayed_link(one.link, guard.keys, accepts) as one.link:
                self._serve_requests(one)
        finally:
            self._tickets.end_relay()

    def _prove_peer(self, one: UnprovenLink) -> bool:
        """Return whether the other end may have this node's state. A process on this host must belong to the same user.
        Over TLS, the other end must have a valid certificate of the job."""
        link = one.link
        if self._guard is None or self._context is None:
            if link.family == socket.AF_UNIX and read_peer(link).user != os.getuid():
                return False
            if link.family == socket.AF_UNIX:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BYTES)
            return True
        with self._lock:  # whoever sends it away must find it
            secured = one.link = self._context.wrap_socket(link, server_side=True, do_handshake_on_connect=False)
            if one.unwanted:
                return False
        secured.do_handshake()
        one.certificate = secured.getpeercert() or {}
        one.node = mutual_tls.certificate_node(one.certificate)
        if not self._guard.accepts_caller(one.certificate):
            return False
        self._known_hosts.add(one.host)
        return True

    def _serve_requests(self, one: UnprovenLink) -> None:
        """Answer requests one after the other until the other end hangs up."""
        with suppress(OSError, TransportError):
            while self._answer_request(one):
                one.link.settimeout(WAIT_S)

    def _answer_request(self, one: UnprovenLink) -> bool:
        link, node = one.link, one.node
        try:
            ask = from_json(read_line(link), PeerRequest)
        except msgspec.DecodeError:
            _send_reply(link, PeerReply(error="not a request of this version of holdfast"))
            return False
        if self._guard and not self._guard.accepts_caller(one.certificate):
            return False  # its node has left the job since it called
        link.settimeout(WAIT_S)
        while node and not self._may_ask(node):
            time.sleep(_BREATH_S)
        if ask.verb in ("push", "tell"):
            self._receive_state(link, ask, node)
        else:
            self._send_state(link, ask)
        return True

    def _may_ask(self, node: str) -> bool:
        with self._lock:
            return self._rates.may_call(node)

    def _receive_state(self, link: socket.socket, ask: PeerRequest, node: str) -> None:
        holding = self._take(ask, node)
        if isinstance(holding, PeerRefusal):
            _send_reply(link, PeerReply(error=holding.text, code=holding.code))
            return
        all = cut_chunks(holding.views)
        count = max(len(all), holding.done)  # of what is here already, the memory is not named
        start, end = ask.part or (0, count)
        if not 0 <= start <= end <= count or (ask.part and holding.mix):  # halves of a parity come in their order
            _send_reply(link, PeerReply(error=f"there is no part {start} to {end} of {count} chunks"))
            return
        first = max(start, holding.first_missing(end))  # fixed: a link that broke may still have a chunk to deliver
        tickets = self._tickets.grant(node, ask.links) if node and not holding.mix and first < end else ()
        _send_reply(link, PeerReply(chunks=first, tickets=tickets))
        if tickets:
            return  # the parts come by their links
        _receive_chunks(link, holding, all[first:end], first)
        try:
            if holding.done >= len(all):
                holding.finish_once()
        except TransportError as e:
            _send_reply(link, PeerReply(error=str(e), code=e.code))
        else:
            _send_reply(link, PeerReply(chunks=end))

    def _send_state(self, link: socket.socket, ask: PeerRequest) -> None:
        given = self._give(ask)
        if isinstance(given, PeerRefusal):
            _send_reply(link, PeerReply(error=given.text, code=given.code))
            return
        views, release = given
        try:
            _send_reply(link, PeerReply(bytes=sum(map(len, views))))
            for chunk in cut_chunks(views):
                send_chunk(link, chunk)
        finally:
            release()


def _receive_chunks(link: socket.socket, holding: PushTarget, coming: list[memoryview], first: int) -> None:
    aside = memoryview(bytearray(max(map(len, coming), default=0) if holding.mix else 0))
    for number, chunk in enumerate(coming, first):
        if holding.mix is None:
            with holding.admit_chunk(link):
                receive_chunk(link, chunk, number)
            holding.on_chunk(number)
        else:
            apart = aside[: len(chunk)]
            holding.mix(number, apart, receive_chunk(link, apart, number))


def _send_reply(link: socket.socket, reply: PeerReply) -> None:
    link.sendall(msgspec.json.encode(reply) + b"\n")
