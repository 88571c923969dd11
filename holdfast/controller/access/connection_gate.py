"""Guards the ports of controller and `holdfast dash`: callers get few links and little time to prove themselves."""

import asyncio
import logging
import resource
import socket
import ssl
from asyncio import selector_events, sslproto
from collections import deque
from collections.abc import Callable

_PROVE_S = 10.0
_HANDSHAKE_S = 5.0
_FROM_ONE_HOST = 256  # that are being attended to, and have not proved themselves
_IN_ALL = 1024
_QUEUED = 4096  # links that are not attended to yet
_IDLE_S = 2.0  # who has not proved itself by then makes room where others wait
_AT_ONCE = 16  # links that are taken before those that are in get their turn
_TICK_S = 0.01
_BREATH_S = 0.1  # where there are no more files to be had
_READ_BYTES = 32 << 10  # at once from a link; two records of TLS, and more than an agent says
_log = logging.getLogger("holdfast.porch")


class ConnectionGate:
    def __init__(self, protocol: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None) -> None:
        self._protocol, self._context = protocol, context
        # asyncio keeps so much for every link of TLS, and has no other way to be told: its 256 KiB are half a gigabyte
        # where there are two thousand agents. Without TLS they are kept with every request that is none.
        sslproto.SSLProtocol.max_size = _READ_BYTES
        selector_events._SelectorTransport.max_size = _READ_BYTES  # type: ignore[attr-defined]
        self._strangers: dict[str, dict[asyncio.Task[None], float]] = {}  # by host, the oldest first, and since when
        self._count = 0  # of all these
        self._queues: dict[str, deque[socket.socket]] = {}  # by host
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # half of them are for those who are in
        self._queued = min(_QUEUED, max(_AT_ONCE, files // 2 - _FROM_ONE_HOST)) if files > 0 else _QUEUED
        self._armed: set[str] = set()  # hosts whose queue is looked at again
        self._waiting: dict[asyncio.BaseTransport, asyncio.Event] = {}

    def note_proved(self, transport: asyncio.BaseTransport | None) -> None:
        """Record that the caller on this link has proved itself, so that the link may stay."""
        if transport is not None and (event := self._waiting.get(transport)):
            event.set()

    async def run(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        try:
            while True:
                for _ in range(_AT_ONCE):
                    await self._accept_links(listener)
                await asyncio.sleep(0)  # where many wait, as after a restart of ours, those that are in go first
        finally:
            for link in [link for queue in self._queues.values() for link in queue]:
                link.close()
            self._queues.clear()
            for task in [task for ours in self._strangers.values() for task in ours]:
                task.cancel()

    async def _accept_links(self, listener: socket.socket) -> None:
        try:
            link, address = await asyncio.get_running_loop().sock_accept(listener)
        except OSError as e:
            _log.warning("cannot accept a connection at the port: %s", e)
            await asyncio.sleep(_BREATH_S)
            return
        self._queue_link(link, str(address[0]))

    def _queue_link(self, link: socket.socket, host: str) -> None:
        """Queue a new link until it is its host's turn, because many come at once after a controller restart.
        Handshakes that have begun are not aborted in favour of a new link, because that would waste the work done."""
        queue = self._queues.setdefault(host, deque())
        queue.append(link)
        self._call_next(host)
        if sum(map(len, self._queues.values())) > self._queued:
            longest = max(self._queues.values(), key=len)  # whoever calls most often waits in vain, and nobody else
            longest.popleft().close()

    def _call_next(self, host: str) -> None:
        queue, loop = self._queues.get(host, deque()), asyncio.get_running_loop()
        while queue:
            ours = self._strangers.setdefault(host, {})
            if len(ours) >= _FROM_ONE_HOST or self._count >= _IN_ALL:
                crowded = host if len(ours) >= _FROM_ONE_HOST else max(self._strangers, key=self._strangers_of)
                oldest, since = next(iter(self._strangers[crowded].items()))
                if loop.time() < since + _IDLE_S:
                    self._call_later(host, since + _IDLE_S)
                    return
                self._forget_link(crowded, oldest)
                oldest.cancel()
                continue
            task = asyncio.create_task(self._serve_link(queue.popleft(), host))
            ours[task] = loop.time()
            self._count += 1
            task.add_done_callback(lambda done: self._on_link_end(host, done))
        self._queues.pop(host, None)

    def _strangers_of(self, host: str) -> int:
        return len(self._strangers[host])

    def _call_later(self, host: str, at: float) -> None:
        if host not in self._armed:
            self._armed.add(host)
            asyncio.get_running_loop().call_at(at + _TICK_S, self._call_again, host)

    def _call_again(self, host: str) -> None:
        self._armed.discard(host)
        self._call_next(host)

    def _on_link_end(self, host: str, task: "asyncio.Task[None]") -> None:
        self._forget_link(host, task)
        self._call_next(host)

    def _forget_link(self, host: str, task: "asyncio.Task[None]") -> None:
        ours = self._strangers.get(host, {})
        if task in ours:
            del ours[task]
            self._count -= 1
        if not ours:
            self._strangers.pop(host, None)

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
                link.close()
        except OSError as e:  # it went away, or does not speak TLS
            _log.debug("a connection from %s broke before the caller had proved itself: %s", host, e)
        finally:
            if transport is not None:
                self._waiting.pop(transport, None)
