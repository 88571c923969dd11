"""Keeps arenas of another world size aside, so that ranks can restore the states in them.

If every rank has the whole state, a world of any size can restore it. A state that is divided among ranks is cut anew
from the snapshots of all of them. Snapshots are laid out for the old size, so ranks get new arenas. The old arenas stay
until they are needed no more.
"""

import asyncio

import msgspec

from holdfast.agent.snapshots.arena_table import ArenaTable, OwnArena
from holdfast.agent.snapshots.keeper_interfaces import KeeperPorts
from holdfast.checkpoint.arena import Arena
from holdfast.core.snapshots.keeper_launch_state import KeeperLaunch
from holdfast.model.copy_aim import Aim
from holdfast.wire.rank_keeper_messages import KeeperRefusal, StateGrant


class OtherSizeArenas:
    def __init__(self, arenas: ArenaTable, ports: KeeperPorts) -> None:
        self._arenas, self._ports = arenas, ports
        self._names: dict[str, str] = {}  # by path

    def adopt_arena(self, name: str, path: str, world: int) -> None:
        """Take over a rank's arena from an earlier agent. Set it aside if its world size differs from `world`; 0
        accepts any size. Raises ArenaError."""
        arena = Arena.open(path)
        self._names[path] = name
        self._arenas.put_arena(path, arena, aside=bool(world) and arena.world != world)

    async def make_memory(self, rank: int, generation: int, size_bytes: int) -> str:
        """Have the holder make memory for a rank's next arena; return its path. Arenas that were set aside stay."""
        own, name = self._arenas.find_arena(rank), f"rank-{rank}"
        if own is not None:
            name = self._names.get(own.path, name)
        elif name in {self._names.get(one.path) for one in self._arenas.list_aside()}:
            name = f"{name}-{generation}"
        path = await self._ports.make_arena(name, size_bytes)
        self._names[path] = name
        return path

    async def verify_state(self, own: OwnArena, step: int) -> StateGrant | KeeperRefusal:
        """Return where an undamaged snapshot of this step lies, or a refusal. A damaged one is dropped for good."""
        arena = own.arena
        for one in arena.list_sealed():
            if one.step != step:
                continue
            wrong = await asyncio.to_thread(arena.verify, one.slot)
            if not wrong:
                return StateGrant(source="memory", step=step, arena=own.path, slot=one.slot)
            arena.drop(one.slot)
            self._ports.say(f"dropped the damaged snapshot of rank {arena.rank} at step {step} ({wrong})")
            return KeeperRefusal(why=wrong)
        return KeeperRefusal(why=f"this node no longer has a snapshot of rank {arena.rank} at step {step}")

    async def find_replica(self, launch: KeeperLaunch, rank: int) -> StateGrant:
        """Return where the whole state lies on this node, or that another rank must send it. Look first in the rank's
        own arena, then in the arenas that were set aside, beginning with the one of the rank's place on the node."""
        own, aside = self._arenas.find_arena(rank), self._arenas.list_aside()
        first, step = launch.ranks.index(rank), launch.restore.step
        for one in (*((own,) if own else ()), *aside[first:], *aside[:first]):
            if isinstance(state := await self.verify_state(one, step), StateGrant):
                return msgspec.structs.replace(state, replicated=True)
        return StateGrant(source="replica", step=step, replicated=True)

    async def free_unneeded(self, launch: KeeperLaunch, aim: Aim) -> None:
        """Free the arenas that were set aside, once each rank of the launch has a snapshot in its new arena. If the
        state was cut anew, other nodes may still read them, and another failure may need them: then wait until every
        node of this generation has a copy of a state elsewhere."""
        cut = launch.restore.cut_from and not (aim.generation == launch.generation and aim.floor >= 0)
        if cut or not self._arenas.list_aside():
            return
        owns = [self._arenas.find_arena(rank) for rank in launch.ranks]
        if all(own is not None and own.arena.list_sealed() for own in owns):
            for path in self._arenas.forget_aside():
                await self._ports.make_arena(self._names.pop(path), 0)
