"""Arenas for copies and parities that this node keeps for other nodes, and the layouts of their ranks."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from holdfast.agent.snapshots.arena_table import SnapshotPin, drop_left, pin_snapshot
from holdfast.agent.snapshots.keeper_interfaces import KeeperNotes, MakeArena, WaitForLoop
from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.arena_header import arena_bytes
from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.checkpoint.peer_server import PushTarget
from holdfast.checkpoint.peer_transport import PeerRefusal, PeerRequest, RefusalCode, TransportError
from holdfast.core.snapshots.keeper_launch_state import KeeperLaunch
from holdfast.decoding import from_msgpack
from holdfast.model.state_copy import KEPT_DIGITS
from holdfast.wire.rank_keeper_messages import layout_file_name

NO_LAYOUT = PeerRefusal("this node does not know the layout", RefusalCode.NO_LAYOUT)
PREFIX = "backup-"  # of the names of arenas
_SLOTS = 2  # the job's floor, which is held, and the next, which is coming in
_MAKE_S = 60.0
_PLAN_BYTES = 1 << 26  # of 100,000 tensors and more


class PeerArena(msgspec.Struct):
    """An arena with copies of one rank's share, or with parities of two ranks."""

    arena: Arena
    held: SnapshotPin | None = None  # the floor

    def pin_step(self, step: int) -> bool:
        """Pin the copy of this step and unpin the one pinned before; return False if there is no such copy."""
        if self.held and self.held.step == step:
            return True
        found = next((one for one in self.arena.list_sealed() if one.step == step), None)
        pinned = pin_snapshot(self.arena, found) if found else None
        if pinned is None:
            return False
        self.unpin()
        self.held = pinned
        return True

    def unpin(self) -> None:
        if self.held:
            self.held.release()
            self.held = None

    def forget_left(self, launch: KeeperLaunch) -> None:
        """Drop copies and parities whose lineage this launch does not continue."""
        drop_left(self.arena, launch)
        if self.held and launch.drops(self.held.sealed.generation, self.held.step):
            self.unpin()


class PeerLayouts:
    """Layouts of ranks that run on other nodes, each received once and kept on disk."""

    def __init__(self, notes: KeeperNotes) -> None:
        self._notes = notes
        self._known: dict[tuple[int, str], ImageLayout] = {}

    def get(self, rank: int, layout: str) -> ImageLayout | None:
        if (rank, layout) not in self._known:
            try:
                content = self._notes.read_note(layout_file_name(rank, layout))
                self._known[rank, layout] = from_msgpack(content, ImageLayout)
            except (OSError, msgspec.DecodeError):
                return None
        return self._known[rank, layout]

    def receive_layout(self, ask: PeerRequest) -> PushTarget | PeerRefusal:
        if not 0 < ask.bytes <= _PLAN_BYTES:
            return PeerRefusal(f"a layout must have 1 to {_PLAN_BYTES} bytes, not {ask.bytes}")
        content = bytearray(ask.bytes)

        def learned() -> None:
            try:
                plan = from_msgpack(content, ImageLayout)
            except msgspec.DecodeError as e:
                raise TransportError(f"this is no layout: {e}") from None
            if plan.rank != ask.rank or len(ask.layout) < KEPT_DIGITS or not plan.digest.hex().startswith(ask.layout):
                raise TransportError(f"this is not the layout {ask.layout} of rank {ask.rank}")
            self._notes.write_note(layout_file_name(ask.rank, ask.layout), bytes(content))
            self._known.pop((ask.rank, ask.layout), None)

        return PushTarget([memoryview(content)], 0, learned)


class PeerMemory:
    """Has the event loop make arenas for peers. A caller must not hold a lock that the event loop may wait for."""

    def __init__(self, make_arena: MakeArena, wait_for_loop: WaitForLoop) -> None:
        self._make_arena, self._wait_for_loop = make_arena, wait_for_loop
        self._running: asyncio.AbstractEventLoop | None = None

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._running = loop

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call a function in the event loop; do nothing if the loop is closed."""
        if self._running and not self._running.is_closed():
            self._running.call_soon_threadsafe(call)

    def fit_arena(
        self, found: PeerArena | None, name: str, layout: bytes, ask: PeerRequest, image_bytes: int
    ) -> PeerArena:
        """Return the arena `found` if it fits this request, or else a new one."""
        wanted = (layout, image_bytes, ask.world)
        if found and (found.arena.layout, found.arena.image_bytes, found.arena.world) == wanted:
            return found
        assert self._running is not None
        making = _await_path(self._make_arena(f"{PREFIX}{name}", arena_bytes(image_bytes, _SLOTS)))
        path = self._wait_for_loop(making, self._running)
        rank, world = ask.rank, ask.world
        return PeerArena(Arena.make(path, layout=layout, image_bytes=image_bytes, slots=_SLOTS, rank=rank, world=world))


async def _await_path(making: Awaitable[str]) -> str:
    return await making


def wait_for_loop(making: Coroutine[Any, Any, str], loop: asyncio.AbstractEventLoop) -> str:
    """Wait in a thread until the event loop has made an arena."""
    return asyncio.run_coroutine_threadsafe(making, loop).result(_MAKE_S)
