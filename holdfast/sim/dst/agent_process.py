"""An agent's process on a simulated machine: the real agent, killed at any point."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.detect.crash import alarm_of
from holdfast.model.alarm import Alarm
from holdfast.model.observation import Exit
from holdfast.sim.dst.agent_interface import AgentCrashed
from holdfast.sim.dst.simulated_errands import SimHealth
from holdfast.sim.dst.simulated_link import SimLink
from holdfast.sim.dst.simulated_rank_holder import SimHolder
from holdfast.sim.dst.simulated_snapshot_keeper import CopySender, SimKeeper, SimOwnSnapshots
from holdfast.sim.dst.virtual_loop import describe_error
from holdfast.wire.holder_messages import HolderRank, RankKey

if TYPE_CHECKING:
    from holdfast.sim.dst.simulated_machine import SimMachine

LEAVE_S = 20.0  # a node that is to leave has by then, whatever its ranks do


class AgentProcess:
    """One process of an agent; once the process is dead, its code that still runs has no effect."""

    def __init__(self, machine: "SimMachine") -> None:
        self.machine = machine
        self.world = machine.world
        self.alive = True
        self.link: SimLink | None = None
        self.holder: SimHolder
        self.keeper: SimKeeper
        self.health: SimHealth
        self.agent = self.world.build_agent(self)
        if machine.leaves:
            self.world.call_later(LEAVE_S, self._check_left)
        self._task = self.world.loop.create_task(self._run_agent())

    def open_holder(self, on_rank_exit: Callable[[HolderRank], None]) -> SimHolder:
        self.holder = SimHolder(self, on_rank_exit)
        return self.holder

    def open_keeper(self, snapshots: SimOwnSnapshots, sender: CopySender) -> SimKeeper:
        machine, verifies = self.machine, self.world.setup.verified
        self.keeper = SimKeeper(
            machine.name, machine.memory, snapshots, sender, verifies=verifies, states=machine.states
        )
        return self.keeper

    async def judge_exit(self, exit: Exit) -> Alarm:
        """Return the alarm for a rank's last words, after a random delay."""
        told = msgspec.structs.replace(exit, words=self.machine.held[RankKey(exit.generation, exit.rank)].words)
        await asyncio.sleep(self.world.rng.uniform(0.01, 0.3))
        return alarm_of(told, self.world.catalog)

    async def _run_agent(self) -> None:
        try:
            await self.agent.run()
        except BaseException as e:
            if self.alive:
                self.world.report_failure(f"the agent of {self.machine.name} fails: {describe_error(e)}")

    def check_alive(self) -> None:
        """Called just before this process changes the world; raises AgentCrashed if it is dead."""
        if not self.alive:
            raise AgentCrashed

    def strike_point(self, point: str) -> None:
        """Called at a point where a crash matters; raises AgentCrashed if the process is dead or dies now."""
        self.check_alive()
        if self.world.faults.kills_agent_at(self.machine, point):
            raise AgentCrashed

    def end_process(self) -> None:
        """Kill the agent: it finishes nothing that it had begun, and the kernel closes its link."""
        self.alive = False
        self._task.cancel()
        if self.link:
            self.link.hang_up()

    def _check_left(self) -> None:
        if self.alive:
            self.world.truth.on_stay(self.machine.name)
