"""The keeper of one simulated agent as the agent sees it: notes launches, and sends copies to the node's peer."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from holdfast.model.errand import FinalState, LaunchHere
from holdfast.model.signal import Beat
from holdfast.model.state_copy import Aim, Copy
from holdfast.wire.holder_messages import KeptArena

if TYPE_CHECKING:
    from holdfast.sim.dst.agent_process import AgentProcess

_COPY_S = 0.3
_LOOK_S = 0.5
_AGAIN_S = 1.0


class SimBackup:
    def __init__(self, process: "AgentProcess", on_copies: Callable[[], None]) -> None:
        self._process = process
        self._machine = process.machine
        self._world = process.world
        self._keeper = process.keeper
        self._on_copies = on_copies
        self.revoked: frozenset[str] = frozenset()
        self.address = (process.machine.name, 1)

    @property
    def stored(self) -> int:
        return self._keeper.stored

    def adopt_arenas(self, kept: tuple[KeptArena, ...]) -> None:
        self._keeper.recall_launch(self._machine.disk.launch)

    def begin_launch(self, errand: LaunchHere) -> str:
        """Drop what the launch gives up, whatever becomes of the note."""
        self._process.check_alive()
        self._keeper.begin_launch(errand)
        return self._machine.disk.write_launch(errand)

    async def apply_aim(self, aim: Aim) -> None:
        self._process.check_alive()
        self._keeper.apply_aim(aim)

    def list_copies(self) -> tuple[Copy, ...]:
        return self._keeper.list_copies()

    def complete_beat(self, beat: Beat) -> Beat:
        keeper = self._keeper
        return msgspec.structs.replace(
            beat,
            sealed=keeper.sealed_step(),
            backed=keeper.backed,
            backing_s=_COPY_S,
            stored=keeper.stored,
            verifies=keeper.verifies,
        )

    async def write_final(self, lasts: tuple[FinalState, ...], within_s: float) -> None:
        pass

    async def send_copies(self) -> None:
        """Send snapshots to the peer as soon as they are ready, for as long as the agent lives."""
        keeper = self._keeper
        while True:
            await asyncio.sleep(_LOOK_S)
            if ready := keeper.ready_snapshots():
                generation, peer, step = keeper.generation, keeper.aim.peer, next(iter(ready.values())).step
                keeper.sending = step
                await asyncio.sleep(_COPY_S * self._world.rng.uniform(0.3, 2.0))
                await self._send_step(generation, peer, step)

    async def _send_step(self, generation: int, peer: str, step: int) -> None:
        """Try until the peer has the step, or something else is to be sent."""
        keeper = self._keeper
        while keeper.generation == generation and keeper.sending == step:
            self._process.check_alive()
            if self._is_kept(generation, peer, step):
                keeper.sending, keeper.backed = 0, step
                self._on_copies()
                return
            await asyncio.sleep(_AGAIN_S)

    def _is_kept(self, generation: int, peer: str, step: int) -> bool:
        """Hand the copies to the peer, if there is one; return whether it keeps all of them."""
        own = self._keeper.memory.own
        snaps = {rank: own[rank].find_step(step) for rank in self._keeper.ranks if rank in own}
        if not peer:
            return all(snaps.values())
        there = self._world.machines.get(peer)
        if not (there and there.agent and there.is_connected and self._machine.is_connected):
            return False
        theirs, world = there.agent.keeper, self._world.world_size(generation)
        return all(snap is not None and theirs.keep_copy(rank, generation, world, snap) for rank, snap in snaps.items())
