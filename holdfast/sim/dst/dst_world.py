"""The world of one seed: makes its machines, controller, faults and storage, and connects them."""

from collections.abc import Callable

import msgspec

from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.model.decider_events import Order
from holdfast.sim.dst.agent_process import AgentProcess, BuildAgent
from holdfast.sim.dst.controller_disk import SimDisk
from holdfast.sim.dst.controller_process import ControllerProcess
from holdfast.sim.dst.failpoints import FaultChances
from holdfast.sim.dst.random_faults import RandomFaults
from holdfast.sim.dst.real_program_protocols import BuildController
from holdfast.sim.dst.seed_parameters import SeedSetup
from holdfast.sim.dst.seed_scene import SeedScene
from holdfast.sim.dst.simulated_fleet import MachinePool
from holdfast.sim.dst.simulated_machine import SimMachine
from holdfast.sim.dst.simulated_ranks import RankTeams, SimStorage
from holdfast.sim.dst.truth_checks import TruthChecks


class RealParts(msgspec.Struct, frozen=True, kw_only=True):
    """The real controller and the real agent, which the simulation tests."""

    build_controller: BuildController
    build_agent: BuildAgent


class DstWorld:
    def __init__(
        self, setup: SeedSetup, real: RealParts, catalog: FailureCatalog, say: Callable[[str], None] | None
    ) -> None:
        self.scene = SeedScene(setup, say)
        self.machines: dict[str, SimMachine] = {}
        disk, storage = SimDisk(), SimStorage()
        self.truth = TruthChecks(self.scene, disk, self.machines, storage.kept)
        self.teams = RankTeams(self.scene, self.truth, self.machines, storage)
        self.chances = FaultChances(self.scene)
        self.cloud = MachinePool(self.machines, self.chances, self.teams, self._make_agent)
        self.office = ControllerProcess(self.scene, real.build_controller, disk, self.truth, self.cloud)
        self.faults = RandomFaults(self.chances, self.teams, self.office)
        self._catalog = catalog
        self._build_agent = real.build_agent

    def _make_agent(self, machine: SimMachine) -> AgentProcess:
        return AgentProcess(machine, self.chances, self.office, self._catalog, self._build_agent)

    def start_world(self) -> None:
        """Start the controller and the faults; start all machines too if the job cannot acquire nodes from a fleet."""
        setup = self.scene.setup
        self.office.start()
        if not setup.job.can_acquire:
            for _ in range(setup.machines):
                self.cloud.make_machine()
        self.faults.start_faults()
        if setup.stop_s:
            self.scene.call_later(setup.stop_s, self.office.give_order, Order(verb="stop", who="somebody"))

    def close(self) -> None:
        """End all processes and the event loop."""
        self.scene.end_checks()
        self.office.ended = True
        for machine in self.machines.values():
            if machine.agent:
                machine.agent.alive = False
            machine.memory.lose_all()
        self.office.crash_controller("with the simulation")
        self.scene.close()
