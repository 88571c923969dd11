"""The world of one seed: machines, controller, faults and storage, and the clock that drives them."""

import asyncio
import traceback
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from holdfast.core.detect.crash import FailureCatalog
from holdfast.model.event import Order
from holdfast.sim.dst.agent_interface import BuildAgent
from holdfast.sim.dst.agent_process import AgentProcess
from holdfast.sim.dst.controller_interface import BuildController
from holdfast.sim.dst.controller_process import ControllerProcess
from holdfast.sim.dst.machine_pool import MachinePool
from holdfast.sim.dst.random_faults import RandomFaults
from holdfast.sim.dst.seed_setup import SeedSetup
from holdfast.sim.dst.simulated_link import SimLink
from holdfast.sim.dst.simulated_machine import SimMachine
from holdfast.sim.dst.simulated_ranks import RankTeams, SimStorage
from holdfast.sim.dst.truth_checks import TruthChecks
from holdfast.sim.dst.virtual_loop import VirtualLoop


class RealParts(msgspec.Struct, frozen=True, kw_only=True):
    """The real controller and the real agent, which the simulation tests."""

    build_controller: BuildController
    build_agent: BuildAgent


class DstWorld:
    def __init__(
        self, setup: SeedSetup, real: RealParts, catalog: FailureCatalog, say: Callable[[str], None] | None
    ) -> None:
        self.setup = setup
        self.build_agent = real.build_agent
        self.catalog = catalog
        self.loop = VirtualLoop()
        self.rng = Random(setup.seed)
        self.machines: dict[str, SimMachine] = {}
        self.teams = RankTeams(self)
        self.storage = SimStorage()
        self.faults = RandomFaults(self)
        self.cloud = MachinePool(self)
        self.office = ControllerProcess(self, real.build_controller)
        self.truth = TruthChecks(self, self.office.disk)
        self.over = False  # the job is
        self.failure = ""  # the first promise that was broken
        self._say = say
        self._closed = False
        self.loop.set_exception_handler(self._on_loop_error)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, what: dict[str, Any]) -> None:
        error = what.get("exception")
        where = traceback.extract_tb(error.__traceback__)[-1] if error else None
        self.report_failure(f"{what['message']}: {error!r} at {where}")

    def now(self) -> float:
        return self.loop.at

    def log_line(self, text: str) -> None:
        if self._say:
            self._say(f"{self.loop.at:9.3f} {text}")

    def call_later(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        self.loop.call_later(delay_s, call, *args)

    def report_failure(self, what: str) -> None:
        if not self.failure and not self._closed:
            self.failure = f"at {self.loop.at:.3f}: {what}"
            self.log_line(f"BROKEN: {what}")
            if self.loop.is_running():
                self.loop.stop()

    def run(self, until: float) -> None:
        """Let virtual time pass until `until`, or until a check fails."""
        if not self.failure:
            end = self.loop.call_at(until, self.loop.stop)
            self.loop.run_forever()
            end.cancel()

    def dial_controller(self, process: AgentProcess) -> SimLink | None:
        if process.machine.cut or process.machine.apart:
            return None
        link = SimLink(self.loop, self.rng, process)
        return link if self.office.accept_link(link) else None

    def world_size(self, generation: int) -> int:
        return self.teams.all[generation].size

    def start_world(self) -> None:
        """Start the controller and the faults; start all machines too if the job cannot acquire nodes from a fleet."""
        self.office.start()
        if not self.setup.job.can_acquire:
            for _ in range(self.setup.machines):
                self.cloud.make_machine()
        self.faults.start_faults()
        if self.setup.stop_s:
            self.call_later(self.setup.stop_s, self.office.give_order, Order(verb="stop", who="somebody"))

    def close(self) -> None:
        """End all tasks that still wait in the event loop, and close the loop."""
        self.over = self._closed = self.office.ended = True
        for machine in self.machines.values():
            if machine.agent:
                machine.agent.alive = False
        self.office.crash_controller("with the simulation")
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        asyncio.set_event_loop(None)
        self.loop.close()
