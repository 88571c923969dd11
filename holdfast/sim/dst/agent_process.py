"""The process of an agent on a simulated machine: it runs the real agent and can be killed at any point."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec

from holdfast.core.detect.crash import alarm_of
from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.model.detector_alarm import Alarm
from holdfast.model.node_errands import LaunchHere
from holdfast.model.observation import Exit
from holdfast.sim.dst.controller_process import ControllerProcess
from holdfast.sim.dst.failpoints import FaultChances
from holdfast.sim.dst.real_program_protocols import AgentCrashed, DstAgent
from holdfast.sim.dst.simulated_errands import SimHealth
from holdfast.sim.dst.simulated_keeper_links import SimKeeperLinks
from holdfast.sim.dst.simulated_link import AgentEnd, SimLink
from holdfast.sim.dst.simulated_machine import PublishedSteps, SimMachine
from holdfast.sim.dst.simulated_rank_holder import SimHolder
from holdfast.sim.dst.virtual_loop import describe_error
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import Ack, ErrandMessage
from holdfast.wire.holder_messages import HolderRank, RankEnded, RankKey, ZygoteWarmed

LEAVE_S = 20.0  # a node that is to leave has by then, whatever its ranks do

BuildAgent = Callable[["AgentProcess"], DstAgent]  # out of the parts that its process plays


class AgentProcess:
    """One process of an agent. Code that still runs after the process has died has no effect."""

    def __init__(
        self,
        machine: SimMachine,
        chances: FaultChances,
        office: ControllerProcess,
        catalog: FailureCatalog,
        build_agent: BuildAgent,
    ) -> None:
        self.machine = machine
        self.scene = machine.scene
        self.chances = chances
        self.office = office
        self._catalog = catalog
        self.alive = True
        self.link: SimLink | None = None
        self.holder: SimHolder
        self.links = SimKeeperLinks(machine, office.cloud.machines, self.check_alive)
        self.persisting: PublishedSteps
        self.health: SimHealth
        self.agent = build_agent(self)
        if machine.leaves:
            self.scene.call_later(LEAVE_S, self._check_left)
        self._task = self.scene.loop.create_task(self._run_agent())

    def open_holder(self, on_rank_exit: Callable[[HolderRank], None]) -> SimHolder:
        self.holder = SimHolder(self.machine, self.chances, self.check_alive, on_rank_exit)
        return self.holder

    def open_health(self, on_alarm: Callable[[Alarm], None], now: Callable[[], float]) -> SimHealth:
        self.health = SimHealth(self.machine, on_alarm, now)
        return self.health

    @contextlib.asynccontextmanager
    async def open_link(self) -> AsyncIterator[AgentEnd]:
        self.check_alive()
        link = SimLink(self.scene.loop, self.scene.rng, self._check_promise)
        if self.machine.cut or self.machine.apart or not self.office.accept_link(link):
            raise ConnectionRefusedError
        self.link = link
        self.chances.on_linked(self.machine, link)
        try:
            yield AgentEnd(link, self.check_alive)
        finally:
            self.link = None
            link.hang_up()

    def _check_promise(self, packet: bytes) -> None:
        """Check what a message from the controller promises. The journal must already contain a report that the message
        acknowledges, and the action of an errand that it brings."""
        match agent_messages.decode_from_controller(packet).message:
            case Ack(seq=seq):
                self.office.truth.on_ack(self.agent.life, seq)
            case ErrandMessage(errand=errand):
                self.scene.log_line(f"{self.machine.name}: is told {type(errand).__name__} {errand.id}")
                self.office.truth.on_errand(errand.id)
                if isinstance(errand, LaunchHere):
                    self.office.truth.on_launch(errand.generation, errand.restore)

    async def judge_exit(self, exit: Exit) -> Alarm:
        """Return the alarm for a failed rank by what it printed last. This takes a short, random time."""
        told = msgspec.structs.replace(exit, words=self.machine.held[RankKey(exit.generation, exit.rank)].words)
        await asyncio.sleep(self.scene.rng.uniform(0.01, 0.3))
        return alarm_of(told, self._catalog)

    async def _run_agent(self) -> None:
        try:
            await self.agent.run()
        except BaseException as e:
            if self.alive:
                self.scene.report_failure(f"the agent of {self.machine.name} fails: {describe_error(e)}")

    def hear_holder(self, message: RankEnded | ZygoteWarmed) -> None:
        self.holder.send_agent(message)

    def read_health(self) -> None:
        self.health.read_again()

    def check_alive(self) -> None:
        """Raise AgentCrashed if this process is dead; called just before the process changes the world."""
        if not self.alive:
            raise AgentCrashed

    def strike_point(self, point: str) -> None:
        """Raise AgentCrashed if this process is dead or dies now; called at points where a crash matters."""
        self.check_alive()
        if self.chances.kills_agent_at(self.machine, point):
            raise AgentCrashed

    def end_process(self) -> None:
        """Kill the agent: it finishes nothing that it had begun, and the kernel closes its link."""
        self.alive = False
        self._task.cancel()
        self.links.break_all()
        if self.link:
            self.link.hang_up()

    def _check_left(self) -> None:
        if self.alive:
            self.office.truth.on_stay(self.machine.name)
