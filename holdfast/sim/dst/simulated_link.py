"""Simulated links between agents and the controller: ordered and reliable while they last, but they break.

A message is lost only with its link, as on TCP. It arrives twice when it is sent again on the next link, and late
when the controller still reads from an old link while a new one is up.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import NamedTuple

from aiohttp import WSMsgType

_BINARY = WSMsgType.BINARY
_SLOW, _SLOW_S = 0.02, 1.5  # now and then a message takes this long
_GAP_S = 1e-6
_TELL, _ACK, _HEAD = b"tell", b"ack", 16  # how messages begin that carry an errand, or an acknowledgement


class LinkPacket(NamedTuple):
    """One message of a WebSocket."""

    type: WSMsgType
    data: bytes


class LinkInbox:
    """Messages that have arrived at one end of a link and wait to be read."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def put_packet(self, packet: bytes) -> None:
        self._arrived.append(packet)
        self._wake_reader()

    def close(self) -> None:
        """Accept no more messages; those that have arrived can still be read."""
        self._closed = True
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    async def next_packet(self) -> bytes:
        """Return the next message; raise StopAsyncIteration after the last."""
        while not self._arrived:
            if self._closed:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._arrived.popleft()


class AgentEnd:
    """The agent's end of a link."""

    def __init__(self, link: "SimLink", check_alive: Callable[[], None]) -> None:
        self._link = link
        self._check_alive = check_alive

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await self._link.inbox_here.next_packet()

    async def send_bytes(self, packet: bytes) -> None:
        self._check_alive()
        if not self._link.open_here:
            raise ConnectionResetError
        self._link.send_up(packet)


class SimLink:
    """One WebSocket between an agent and the controller; the two ends notice at different times that it is dead."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rng: Random, check_promise: Callable[[bytes], None]) -> None:
        self.loop = loop
        self.rng = rng
        self._check_promise = check_promise
        self.open_here = True  # the agent believes in it
        self.open_there = True  # the controller does
        self.dead = False  # nothing gets through any more
        self.stalled_until = 0.0  # everything gets through, but not before
        self._up_at = self._down_at = 0.0
        self.inbox_here, self._inbox_there = LinkInbox(loop), LinkInbox(loop)

    def _arrival_at(self, last_at: float) -> float:
        slow_s = self.rng.random() * _SLOW_S if self.rng.random() < _SLOW else 0.0
        at = max(self.loop.time(), self.stalled_until) + 0.001 + 0.02 * self.rng.random() + slow_s
        return max(at, last_at + _GAP_S)

    # --- the agent's end ---------------------------------------------------------------------------------------

    def send_up(self, packet: bytes) -> None:
        if self.open_here and not self.dead:
            self._up_at = self._arrival_at(self._up_at)
            self.loop.call_at(self._up_at, self._arrive_there, packet)

    def _arrive_there(self, packet: bytes) -> None:
        if self.open_there and not self.dead:
            self._inbox_there.put_packet(packet)

    def _arrive_here(self, packet: bytes) -> None:
        if self.open_here and not self.dead:
            if _ACK in packet[:_HEAD] or _TELL in packet[:_HEAD]:
                self._check_promise(packet)
            self.inbox_here.put_packet(packet)

    def hang_up(self) -> None:
        """Close the link on the agent's side; the controller learns of it a moment later, if the link still works."""
        if self.open_here:
            self.open_here = False
            if not self.dead:
                self.loop.call_at(self._arrival_at(self._up_at), self.end_there)

    def end_here(self) -> None:
        """Close the agent's end of the link, which tells the agent that the link is gone."""
        if self.open_here:
            self.open_here = False
            self.inbox_here.close()

    # --- the controller's end ----------------------------------------------------------------------------------

    def end_there(self) -> None:
        self.open_there = False
        self._inbox_there.close()

    def __aiter__(self) -> AsyncIterator[LinkPacket]:
        return self

    async def __anext__(self) -> LinkPacket:
        return LinkPacket(_BINARY, await self._inbox_there.next_packet())

    async def send_bytes(self, data: bytes) -> None:
        if not self.open_there:
            raise ConnectionResetError
        if not self.dead:
            self._down_at = self._arrival_at(self._down_at)
            self.loop.call_at(self._down_at, self._arrive_here, data)

    async def close(self, *, code: int = 1000, message: bytes = b"") -> bool:
        if self.open_there:
            self.end_there()
            if not self.dead:
                self.loop.call_at(self._arrival_at(self._down_at), self.end_here)
        return True

    # --- what chance does to it --------------------------------------------------------------------------------

    def stall_packets(self, for_s: float) -> None:
        """Delay everything on the link for this long; nothing is lost."""
        self.stalled_until = max(self.stalled_until, self.loop.time() + for_s)

    def break_link(self, noticed_here_s: float, noticed_there_s: float) -> None:
        """Break the link: packets on their way are lost, and each end notices after its own delay."""
        if not self.dead:
            self.dead = True
            self.loop.call_later(noticed_here_s, self.end_here)
            self.loop.call_later(noticed_there_s, self.end_there)


class ControllerEnd:
    """The controller's end of a link; the controller may crash whenever it sends."""

    def __init__(self, link: SimLink, strike: Callable[[str], None]) -> None:
        self._link = link
        self._strike = strike

    def __aiter__(self) -> AsyncIterator[LinkPacket]:
        return self._link

    async def send_bytes(self, data: bytes) -> None:
        self._strike("telling" if _TELL in data[:_HEAD] else "sending")
        await self._link.send_bytes(data)

    async def close(self, *, code: int = 1000, message: bytes = b"") -> bool:
        return await self._link.close(code=code, message=message)
