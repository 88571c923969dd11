"""Simulated links between agents and the controller: ordered and reliable while they last, but they break.

A message is lost only with its link, as on TCP. It arrives twice when it is sent again on the next link, and late
when the controller still reads from an old link while a new one is up.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from aiohttp import WSMsgType

if TYPE_CHECKING:
    from holdfast.sim.dst.simulated_agent import SimAgent

_BINARY = WSMsgType.BINARY
_SLOW, _SLOW_S = 0.02, 1.5  # now and then a message takes this long
_GAP_S = 1e-6
_TELL, _HEAD = b"tell", 16  # how a message that carries an errand begins


class LinkPacket(NamedTuple):
    """One message of a WebSocket."""

    type: WSMsgType
    data: bytes


class SimLink:
    """One WebSocket; its two ends learn of its death at different times."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rng: Random, agent: "SimAgent") -> None:
        self.loop = loop
        self.rng = rng
        self.agent = agent
        self.open_here = True  # the agent believes in it
        self.open_there = True  # the controller does
        self.dead = False  # nothing gets through any more
        self.stalled_until = 0.0  # everything gets through, but not before
        self._up_at = self._down_at = 0.0
        self._heard: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None

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
            self._heard.append(packet)
            self._wake_reader()

    def _arrive_here(self, packet: bytes) -> None:
        if self.open_here and not self.dead:
            self.agent.on_message(self, packet)

    def hang_up(self) -> None:
        """Close the link on the agent's side; the controller learns of it a moment later, if the link still works."""
        if self.open_here:
            self.open_here = False
            if not self.dead:
                self.loop.call_at(self._arrival_at(self._up_at), self.end_there)

    def end_here(self) -> None:
        """Tell the agent that its link is gone."""
        if self.open_here:
            self.open_here = False
            self.agent.on_unlinked(self)

    # --- the controller's end ----------------------------------------------------------------------------------

    def end_there(self) -> None:
        self.open_there = False
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[LinkPacket]:
        return self

    async def __anext__(self) -> LinkPacket:
        while not self._heard:
            if not self.open_there:
                raise StopAsyncIteration
            self._waiter = self.loop.create_future()
            await self._waiter
        return LinkPacket(_BINARY, self._heard.popleft())

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
    """The end of a link that one life of the controller holds; that life may die whenever it sends."""

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
