"""The keeper of one simulated agent as the agent sees it: notes launches, and sends copies to the node's peer."""

import asyncio
from typing import TYPE_CHECKING

import msgspec

from holdfast.model.errand import FinalState, LaunchHere
from holdfast.model.signal import Beat
from holdfast.model.state_copy import Aim, Copy
from holdfast.sim.dst.simulated_keeper import SimKeeper
from holdfast.wire.holder_messages import KeptArena

if TYPE_CHECKING:
    from holdfast.sim.dst.agent_process import AgentProcess

_COPY_S = 0.3
_LOOK_S = 0.5
_AGAIN_S = 1.0


class SimBackup:
    def __init__(self, process: "AgentProcess", keeper: SimKeeper) -> None:
        self._process = process
        self._machine = process.machine
        self._world = process.world
        self._keeper = keeper
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
            backed=keeper.floor.backed,
            backing_s=keeper.floor.took_s,
            stored=keeper.stored,
            verifies=keeper.floor.verifies,
        )

    async def write_final(self, lasts: tuple[FinalState, ...], within_s: float) -> None:
        pass

    async def send_copies(self) -> None:
        """Send snapshots to the peer as soon as they are ready, for as long as the agent lives."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._keeper.is_next_ready():
                self._keeper.begin_sending()
                await asyncio.sleep(_COPY_S * self._world.rng.uniform(0.3, 2.0))
                await self._deliver_copies()

    async def _deliver_copies(self) -> None:
        """Try until the peer has the copies, or they are no longer wanted."""
        self._process.check_alive()
        while not self._keeper.deliver_copies(self._reach_keeper):
            await asyncio.sleep(_AGAIN_S)
            self._process.check_alive()

    def _reach_keeper(self, node: str) -> SimKeeper | None:
        there = self._world.machines.get(node)
        connected = there and there.is_connected and self._machine.is_connected
        return there.agent.keeper if there and connected and there.agent else None
