"""Guards the ports of the controller and `holdfast dash`: callers without proof get few and short connections."""

import asyncio
import contextlib
import logging
import resource
import select
import socket
import ssl
from asyncio import selector_events, sslproto
from collections.abc import Callable, Coroutine

from holdfast.controller.access.caller_queue import CallerQueue

_PROVE_S = 10.0
_HANDSHAKE_S = 5.0
_FROM_ONE_HOST = 256  # that are being attended to, and have not proved themselves
_IN_ALL = 1024
_LEAST = 16  # of both where few files may be open
_QUEUED = 4096  # links that have asked for something and are not attended to yet; and as many that have not
_IDLE_S = 2.0  # who has not proved itself by then makes room where others wait
_AT_ONCE = 256  # links that are taken before those that are in get their turn: some milliseconds
_BEGUN_AT_ONCE = 8  # handshakes in one turn of the event loop, of strangers and as many of known hosts; 2 ms each
_TICK_S = 0.01
_BREATH_S = 0.1  # where there are no more files to be had
_READ_BYTES = 32 << 10  # at once from a link; two records of TLS, and more than an agent says
_HEAD_BYTES = 8 << 10  # of a request; a longer one is attended to as it is
_log = logging.getLogger("holdfast.porch")
Serve = Callable[[socket.socket, str], Coroutine[None, None, None]]


class ConnectionGate:
    def __init__(self, protocol: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None) -> None:
        self._protocol, self._context = protocol, context
        # asyncio keeps so much for every link of TLS, and has no other way to be told: its 256 KiB are half a gigabyte
        # where there are two thousand agents. Without TLS they are kept with every request that is none.
        sslproto.SSLProtocol.max_size = _READ_BYTES
        selector_events._SelectorTransport.max_size = _READ_BYTES  # type: ignore[attr-defined]
        # Hosts that have proved themselves have a room of their own, which no stranger can fill.
        missing = _missing_of_record if context else _missing_of_request
        self._strangers, self._known = _Room(self._serve_link, missing), _Room(self._serve_link, missing)
        self._known_hosts: set[str] = set()
        self._waiting: dict[asyncio.BaseTransport, asyncio.Event] = {}

    def note_proved(self, transport: asyncio.BaseTransport | None) -> None:
        """Record that the caller on this link has proved itself, so that the link may stay."""
        if transport is not None and (event := self._waiting.get(transport)):
            event.set()
            if peer := transport.get_extra_info("peername"):
                self._known_hosts.add(str(peer[0]))

    async def run(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        loop, short = asyncio.get_running_loop(), asyncio.Event()
        self._strangers.open()
        self._known.open()
        try:
            while True:
                loop.add_reader(listener, self._accept_links, listener, short)
                await short.wait()
                loop.remove_reader(listener)
                await asyncio.sleep(_BREATH_S)
                short.clear()
        finally:
            loop.remove_reader(listener)
            self._strangers.close()
            self._known.close()

    def _accept_links(self, listener: socket.socket, short: asyncio.Event) -> None:
        """Accept a few links. Set `short` if this fails, for example because no file descriptors are free."""
        for _ in range(_AT_ONCE):
            try:
                link, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as e:
                _log.warning("cannot accept a connection at the port: %s", e)
                short.set()
                return
            link.setblocking(False)
            host = str(address[0])
            (self._known if host in self._known_hosts else self._strangers).admit(link, host)

    async def _serve_link(self, link: socket.socket, host: str) -> None:
        """Serve a link, but abort it if its caller does not prove itself in time."""
        transport: asyncio.BaseTransport | None = None
        try:
            loop, timeout = asyncio.get_running_loop(), _HANDSHAKE_S if self._context else None
            transport, _ = await loop.connect_accepted_socket(
                self._protocol, link, ssl=self._context, ssl_handshake_timeout=timeout
            )
            event = self._waiting[transport] = asyncio.Event()
            async with asyncio.timeout(_PROVE_S):
                await event.wait()
        except (TimeoutError, asyncio.CancelledError) as e:
            if isinstance(transport, asyncio.Transport):
                transport.abort()
            elif isinstance(e, asyncio.CancelledError):
                # It may have a transport that asyncio has not handed out yet. If the link were closed beneath it, the
                # transport would stay, and the next link may have the number of its file.
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
        except OSError as e:  # it went away, or does not speak TLS
            _log.debug("a connection from %s broke before the caller had proved itself: %s", host, e)
        finally:
            if transport is not None:
                self._waiting.pop(transport, None)


class _Room:
    """Links whose callers have not proved themselves. Links without a request so far have a limit of their own, because
    idle links cost an attacker nothing and can come from any number of addresses."""

    def __init__(self, serve: Serve, missing: Callable[[bytes], int]) -> None:
        self._serve, self._missing = serve, missing
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # more than half of them are for those who are in
        places = max(_LEAST, files // 16) if files > 0 else _QUEUED  # of two rooms with three lines each
        self._most, self._most_served = min(_QUEUED, places), min(_IN_ALL, places)
        self._silent: CallerQueue[socket.socket] = CallerQueue()
        self._links: dict[int, socket.socket] = {}  # these, by their file
        self._poll = select.epoll()  # of these alone: the event loop's own takes four times as long for a link
        self._queue: CallerQueue[socket.socket] = CallerQueue()
        self._served: CallerQueue[asyncio.Task[None]] = CallerQueue()
        self._begun = 0  # in this turn of the event loop
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        asyncio.get_running_loop().add_reader(self._poll.fileno(), self._hear_links)

    def admit(self, link: socket.socket, host: str) -> None:
        now = asyncio.get_running_loop().time()
        self._silent.add(link, host, now)
        self._links[link.fileno()] = link
        self._poll.register(link.fileno(), select.EPOLLIN)
        if len(self._silent) > self._most:
            self._drop(self._silent.crowded_out(host))
        elif len(self._silent) == 1:
            self._call_later(now + _PROVE_S)

    def close(self) -> None:
        for link in (*self._silent, *self._queue):
            self._drop(link)
        for task in [*self._served]:
            task.cancel()
        if self._timer:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._poll.fileno())
        self._poll.close()

    def _hear_links(self) -> None:
        for file, _ in self._poll.poll(0, _AT_ONCE):
            self._hear(self._links[file])

    def _hear(self, link: socket.socket) -> None:
        """Queue a link once its first TLS record or request header has arrived; drop it if its caller has gone."""
        try:
            said = link.recv(_HEAD_BYTES, socket.MSG_PEEK)
            gone = len(said) < link.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)  # and yet we are woken
            missing = self._missing(said) if said and len(said) < _HEAD_BYTES else 0
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(said) + missing if missing else 1)
        except BlockingIOError:
            return
        except OSError:
            gone, missing = True, 0
        host = self._silent.host_of(link)
        if gone:
            self._drop(link)
        elif not missing and host is not None:
            self._forget_silent(link)
            self._queue_link(link, host)

    def _drop(self, link: socket.socket) -> None:
        if link.fileno() in self._links:
            self._forget_silent(link)
        self._queue.remove(link)
        link.close()

    def _forget_silent(self, link: socket.socket) -> None:
        self._poll.unregister(link.fileno())
        del self._links[link.fileno()]
        self._silent.remove(link)

    def _queue_link(self, link: socket.socket, host: str) -> None:
        """Queue a link until it is its host's turn, because many come at once after a controller restart.
        Handshakes that have begun are not aborted in favour of a new link, because that would waste the work done."""
        self._queue.add(link, host, asyncio.get_running_loop().time())
        self._call_next()
        if len(self._queue) > self._most:
            self._drop(self._queue.crowded_out(host))

    def _call_next(self) -> None:
        """Serve the next links. Only a few begin in each turn of the event loop, so that accepted links and known hosts
        are not held up."""
        while self._queue and self._begun < _BEGUN_AT_ONCE:
            if len(self._served) >= self._most_served and not self._make_room(None):
                return
            if (found := self._queue.take_turn(self._has_room)) is None:
                return
            task = asyncio.create_task(self._serve(*found))
            self._served.add(task, found[1], asyncio.get_running_loop().time())
            task.add_done_callback(self._on_link_end)
            self._begun += 1
            if self._begun == 1:
                asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._begun = 0
        self._call_next()

    def _has_room(self, host: str) -> bool:
        return self._served.count(host) < _FROM_ONE_HOST or self._make_room(host)

    def _make_room(self, host: str | None) -> bool:
        """Cancel the oldest task (of `host`) if it is older than _IDLE_S. Else set a timer and return False."""
        oldest, since = self._served.oldest(host)
        if asyncio.get_running_loop().time() < since + _IDLE_S:
            self._call_later(since + _IDLE_S)
            return False
        self._served.remove(oldest)
        oldest.cancel()
        return True

    def _on_link_end(self, task: "asyncio.Task[None]") -> None:
        self._served.remove(task)
        self._call_next()

    def _call_later(self, at: float) -> None:
        if self._timer is None or at + _TICK_S < self._timer.when():
            if self._timer:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(at + _TICK_S, self._call_again)

    def _call_again(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        while self._silent and self._silent.oldest()[1] + _PROVE_S <= now:
            self._drop(self._silent.oldest()[0])
        if self._silent:
            self._call_later(self._silent.oldest()[1] + _PROVE_S)
        self._call_next()


def _missing_of_record(said: bytes) -> int:
    """Return how many bytes of the first TLS record are missing; 0 if it is no handshake, which fails later."""
    if said[0] != 22:
        return 0
    return max(0, 5 + int.from_bytes(said[3:5], "big") - len(said)) if len(said) >= 5 else 5 - len(said)


def _missing_of_request(said: bytes) -> int:
    """Return 1 if the end of the request's header is still missing, else 0."""
    return int(b"\r\n\r\n" not in said and b"\n\n" not in said)
