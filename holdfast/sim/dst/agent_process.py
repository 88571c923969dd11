"""An agent's process on a simulated machine: the real agent, killed at any point."""

from typing import TYPE_CHECKING

import msgspec

from holdfast.core.detect.crash import alarm_of
from holdfast.model.alarm import Alarm
from holdfast.model.signal import Exit
from holdfast.sim.dst.agent_interface import AgentCrashed, AgentNews, AgentSetup, PlayedParts
from holdfast.sim.dst.simulated_backup import SimBackup
from holdfast.sim.dst.simulated_errands import SimDiagnosis, SimHealth, SimStaging, SimTracer
from holdfast.sim.dst.simulated_holder import SimHolder
from holdfast.sim.dst.simulated_keeper import SimKeeper
from holdfast.sim.dst.simulated_link import SimDialer, SimLink
from holdfast.sim.dst.simulated_notes import SimNotes
from holdfast.sim.dst.virtual_loop import describe_error
from holdfast.wire.holder_messages import RankKey

if TYPE_CHECKING:
    from holdfast.sim.dst.simulated_machine import SimMachine

LEAVE_S = 20.0  # a node that is to leave has by then, whatever its ranks do


class AgentProcess:
    """One process of an agent; once it is dead, code of it that still runs has no effect."""

    def __init__(self, machine: "SimMachine") -> None:
        self.machine = machine
        self.world = machine.world
        self.alive = True
        self.link: SimLink | None = None
        self.keeper = SimKeeper(machine.name, machine.memory, self.world.setup.verified)
        self.agent = self.world.build_agent(
            AgentSetup(
                node=machine.name,
                order=machine.order,
                nproc=self.world.setup.nproc,
                settings=self.world.setup.settings,
                play=self._play_parts,
            )
        )
        if machine.leaves:
            self.world.call_later(LEAVE_S, self._check_left)
        self._task = self.world.loop.create_task(self._run_agent())

    def _play_parts(self, news: AgentNews) -> PlayedParts:
        self.holder = SimHolder(self, news.on_rank_exit)
        keeper = SimBackup(self, self.keeper, news.on_copies)
        return PlayedParts(
            clock=self.machine.clock,
            dialer=SimDialer(self),
            notes=SimNotes(self),
            ranks=self.holder,
            tracer=SimTracer(self.machine),
            keeper=keeper,
            staging=SimStaging(self.world),
            diagnosis=SimDiagnosis(self.world),
            health=SimHealth(),
            judge=self._judge_exit,
            background=(keeper.send_copies,),
        )

    async def _judge_exit(self, exit: Exit) -> Alarm:
        held = self.machine.held[RankKey(exit.generation, exit.rank)]
        return alarm_of(msgspec.structs.replace(exit, words=held.words), self.world.catalog)

    async def _run_agent(self) -> None:
        try:
            await self.agent.run()
        except BaseException as e:
            if self.alive:
                self.world.report_failure(f"the agent of {self.machine.name} fails: {describe_error(e)}")
            return
        if self.alive:
            self.world.report_failure(f"the agent of {self.machine.name} returns")

    def check_alive(self) -> None:
        """Called just before this process changes the world; raises AgentCrashed if it is dead."""
        if not self.alive:
            raise AgentCrashed

    def strike_point(self, point: str) -> None:
        """Called where a crash would matter; raises AgentCrashed if the process is dead or dies here."""
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
