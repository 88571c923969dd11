"""The keeper: holds the snapshots of a node's ranks beyond their lives, hands them back, makes checkpoints of them.

It runs in the agent, without torch. Ranks write into memory that the holder owns; the keeper only looks, pins what it
reads, and answers the two questions a rank asks: where may I put my snapshots, and where do I go on from.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec

from holdfast.agent.persisting import Persisting
from holdfast.checkpoint.arena import POISONED, VERIFIED, Arena, ArenaError, Sealed, arena_bytes
from holdfast.model.copy import Copy, Restore, Source
from holdfast.model.errand import LaunchHere
from holdfast.wire import keeping, spec, unixpath
from holdfast.wire.holding import KeptArena
from holdfast.wire.keeping import Arena as ArenaAt
from holdfast.wire.keeping import Denied, Resume, State, Want

LOOK_S = 0.02  # how often the headers are looked at
_IDLE_S = 0.2  # the same while no rank has asked for memory
_log = logging.getLogger("holdfast.keeper")


class Keeper:
    def __init__(self, node: str, run_id: str, socket_path: Path, make: Callable[[str, int], Awaitable[str]]) -> None:
        self.node = node
        self.socket_path = socket_path
        self._notes = socket_path.parent  # what a next agent must know lies here
        self.say: Callable[[str], None] = lambda text: None  # to the person at the console
        self._make = make
        self._arenas: dict[int, tuple[str, Arena]] = {}  # rank -> path and content
        self._persisting = Persisting(run_id, lambda text: self.say(text))
        self._generation = 0
        self._restore = Restore()
        self._seen: dict[int, tuple[int, int]] = {}  # rank -> seq and flags of what was looked at last

    def recall(self, kept: tuple[KeptArena, ...]) -> None:
        """Memory from before this agent was started."""
        for one in kept:
            with contextlib.suppress(ArenaError):  # made, and never used
                arena = Arena.open(one.path)
                self._arenas[arena.rank] = (one.path, arena)
        with contextlib.suppress(OSError, msgspec.DecodeError):
            errand = spec.read(self._notes / "launch.json", LaunchHere)
            self._generation, self._restore = errand.generation, errand.restore
            self._persisting.begin(errand.generation)
        for path in self._notes.glob("want-*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                want = spec.read(path, Want)
                if want.generation == self._generation:
                    self._persisting.want(want)

    def copies(self) -> tuple[Copy, ...]:
        """What could be restored from here."""
        return tuple(self._copy(arena, one) for _, arena in self._arenas.values() for one in arena.sealed())

    def _copy(self, arena: Arena, sealed: Sealed) -> Copy:
        return Copy(
            rank=arena.rank,
            step=sealed.step,
            node=self.node,
            layout=arena.layout.hex(),
            world=arena.world,
            whole=True,
            verified=bool(sealed.flags & VERIFIED),
            poisoned=bool(sealed.flags & POISONED),
        )

    def launched(self, errand: LaunchHere) -> None:
        """A generation is about to start from this state; what came after it belongs to a line that is given up."""
        self._generation, self._restore = errand.generation, errand.restore
        self._persisting.begin(errand.generation)
        self._seen.clear()
        spec.write(self._notes / "launch.json", errand)
        for _, arena in self._arenas.values():
            for one in arena.sealed():
                if one.step > errand.restore.step or not errand.restore.sources:
                    arena.drop(one.slot)

    # --- what ranks ask ----------------------------------------------------------------------------------------

    async def serve(self) -> None:
        listener = unixpath.listen(self.socket_path)
        server = await asyncio.start_unix_server(self._talk, sock=listener, limit=keeping.MAX_BYTES)
        async with server:
            await server.serve_forever()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(keeping.encode(await self._answer(line)) + b"\n")
                await writer.drain()
        except (OSError, ValueError) as e:
            _log.info("a rank's line ended: %s", e)
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> keeping.FromKeeper:
        try:
            asked = keeping.to_keeper(line)
        except msgspec.DecodeError as e:
            return Denied(why=f"not a request of this version of holdfast: {e}")
        if asked.generation != self._generation:
            return Denied(why=f"generation {asked.generation} is over; the node runs {self._generation}")
        if isinstance(asked, Want):
            return await self._want(asked)
        return await self._resume(asked)

    async def _want(self, want: Want) -> ArenaAt | Denied:
        path, arena = self._arenas.get(want.rank, ("", None))
        shape = (want.layout, want.image_bytes, want.slots, want.world)
        if arena is None or (arena.layout.hex(), arena.image_bytes, arena.slots, arena.world) != shape:
            try:
                path = await self._make(f"rank-{want.rank}", arena_bytes(want.image_bytes, want.slots))
                arena = Arena.make(
                    path,
                    layout=bytes.fromhex(want.layout),
                    image_bytes=want.image_bytes,
                    slots=want.slots,
                    rank=want.rank,
                    world=want.world,
                )
            except (OSError, ValueError, ArenaError) as e:
                return Denied(why=f"no memory for snapshots: {e}")
            self._arenas[want.rank] = (path, arena)
        self._persisting.want(want)
        spec.write(self._notes / f"want-{want.rank}.json", want)
        return ArenaAt(path=path)

    async def _resume(self, asked: Resume) -> State | Denied:
        source = next((s for s in self._restore.sources if s.rank == asked.rank), None)
        if source is None:
            return State(source="none")
        path, arena = self._arenas.get(asked.rank, ("", None))
        if not source.own or arena is None:
            return Denied(why=f"the snapshot of step {self._restore.step} is not on this node")
        return await self._own(source, path, arena)

    async def _own(self, source: Source, path: str, arena: Arena) -> State | Denied:
        """The rank's own snapshot, verified before it is trusted; one that is damaged is never offered again."""
        step = self._restore.step
        for one in arena.sealed():
            if one.step != step:
                continue
            wrong = await asyncio.to_thread(arena.verify, one.slot)
            if not wrong:
                return State(source="memory", step=step, arena=path, slot=one.slot)
            arena.drop(one.slot)
            self.say(f"the snapshot of rank {source.rank} is damaged ({wrong}); an older one is used")
            return Denied(why=wrong)
        return Denied(why=f"the snapshot of step {step} is gone")

    # --- watching ----------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                for rank, arena, newest in self._due():
                    tasks.create_task(self._persisting.write(rank, arena, newest))
                await asyncio.sleep(LOOK_S if self._arenas else _IDLE_S)

    def _due(self) -> Iterator[tuple[int, Arena, Sealed]]:
        """Snapshots that are to become checkpoints."""
        for rank, (_, arena) in self._arenas.items():
            newest = self._news(rank, arena)
            if newest is not None and self._persisting.due(rank, newest):
                yield rank, arena, newest

    def _news(self, rank: int, arena: Arena) -> Sealed | None:
        """The newest snapshot that this generation took, if it was not looked at before."""
        newest = next(iter(arena.sealed()), None)
        if newest is None or newest.generation != self._generation:
            return None
        seen, self._seen[rank] = self._seen.get(rank), (newest.seq, newest.flags)
        return newest if seen != self._seen[rank] else None
