"""The node's ranks that can survive: knows which are parked, and tells them to leave a generation or to go on. A parked
rank has left the groups of its generation and waits. Nothing here outlives an agent: ranks connect to the next agent
and tell it whether they are parked."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.agent.rank.spare_ranks import SPARE
from holdfast.model.action import HandOver
from holdfast.wire import survivor_messages, unix_sockets
from holdfast.wire.holder_messages import RankKey
from holdfast.wire.survivor_messages import PartOrder, RejoinOrder, SurvivorOrder, SurvivorState

_log = logging.getLogger("holdfast.agent")


class Survivors:
    def __init__(self, path: Path, on_change: Callable[[], None]) -> None:
        """`on_change` is called when a rank parks or closes its connection."""
        self._path, self._on_change = path, on_change
        self._lines: dict[RankKey, asyncio.StreamWriter] = {}
        self._parked: set[RankKey] = set()
        self._announced: set[RankKey] = set()
        self._seats: dict[RankKey, dict[str, str]] = {}  # of spare ranks that are not there yet
        self._over = 0  # ranks of generations up to this one are to leave them
        self._hand_over: HandOver | None = None  # what they do before

    def is_there(self, key: RankKey) -> bool:
        """Return whether this rank is connected, so that it can be told to leave its generation."""
        return key in self._lines

    def has_announced(self, key: RankKey) -> bool:
        """Return whether this rank has said that it can survive; still true after it died."""
        return key in self._announced

    def is_parked(self, key: RankKey) -> bool:
        return key in self._parked

    async def serve(self) -> None:
        listener = unix_sockets.listen(self._path)
        server = await asyncio.start_unix_server(self._hear_rank, sock=listener, limit=survivor_messages.MAX_BYTES)
        async with server:
            await server.serve_forever()

    def part_ranks(self, up_to: int, hand_over: HandOver | None = None) -> None:
        """Tell all ranks of generations up to `up_to` to leave their generation."""
        self._over, self._hand_over = max(self._over, up_to), hand_over
        for key in list(self._lines):
            self._part_rank(key)

    def rejoin(self, key: RankKey, env: dict[str, str]) -> bool:
        """Tell a parked rank to go on with this environment; return whether the message was sent."""
        line = self._lines.pop(key, None)
        self._parked.discard(key)
        return line is not None and _send(line, RejoinOrder(env=env))

    def seat_spare(self, key: RankKey, env: dict[str, str]) -> None:
        """Tell a spare rank to go on with this environment, now or as soon as it waits."""
        if key not in self._parked or not self.rejoin(key, env):
            self._seats[key] = env

    def _part_rank(self, key: RankKey) -> None:
        if SPARE < key.generation <= self._over and key not in self._parked:
            _send(self._lines[key], PartOrder(generation=key.generation, hand_over=self._hand_over))

    async def _hear_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        key: RankKey | None = None
        try:
            while line := await reader.readline():
                key = self._on_state(survivor_messages.to_agent(line), writer)
        except (OSError, ValueError, msgspec.DecodeError) as e:
            _log.info("the line of a rank that survives broke: %s", e)
        finally:
            if key is not None and self._lines.get(key) is writer:
                del self._lines[key]
                self._parked.discard(key)
            writer.close()
            self._on_change()

    def _on_state(self, told: SurvivorState, writer: asyncio.StreamWriter) -> RankKey:
        key = RankKey(told.generation, told.rank)
        self._lines[key] = writer
        (self._parked.add if told.parked else self._parked.discard)(key)
        if key.generation > SPARE:
            self._announced = {key, *(one for one in self._announced if one.generation == key.generation)}
        self._part_rank(key)
        if told.parked and (env := self._seats.pop(key, None)) is not None:
            self.rejoin(key, env)
        self._on_change()
        return key


def _send(line: asyncio.StreamWriter, order: SurvivorOrder) -> bool:
    if line.is_closing():
        return False
    line.write(survivor_messages.encode(order) + b"\n")
    return True
