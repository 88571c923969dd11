"""The simulated fleet and store; machines live outside of the controller and outlive it."""

import asyncio
from collections.abc import Callable, Collection
from random import Random

from holdfast.model.action import Dismissal
from holdfast.model.fleet_node_reports import FleetNode, FleetState
from holdfast.model.observation import Departure
from holdfast.sim.dst.failpoints import FaultChances
from holdfast.sim.dst.simulated_machine import MachineAgent, RankListener, SimMachine


class MachinePool:
    """The machines that were acquired and not given back."""

    def __init__(
        self,
        machines: dict[str, SimMachine],
        chances: FaultChances,
        ranks: RankListener,
        make_agent: Callable[[SimMachine], MachineAgent],
    ) -> None:
        self.scene = chances.scene
        self.machines = machines
        self.chances = chances
        self._ranks = ranks
        self._make_agent = make_agent
        self.nodes: list[str] = []
        self._made = 0
        self.queue = Random(f"queue {chances.scene.setup.seed}")  # so that all else of a seed stays as it was
        self._queued_until: dict[str, float] = {}
        self._ends_at: dict[str, float] = {}

    def make_machine(self) -> str:
        """Make a machine that boots after a while, or never; return its name."""
        name, order = f"n{self._made}", self._made
        self._made += 1
        machine = self.machines[name] = SimMachine(self.scene, name, order, self._ranks, self._make_agent)
        if not self.chances.draw_chance(0.05):
            self.scene.call_later(self._draw_queue_s(name) + self.scene.rng.uniform(0.2, 4.0), machine.boot)
        return name

    def _draw_queue_s(self, name: str) -> float:
        """Draw how long a new machine waits in the queue. Let the cluster end some machines after their wait."""
        if not self.scene.setup.surveys or self.queue.random() < 0.4:
            return 0.0
        queue_s = self.queue.uniform(0.0, 100.0)
        self._queued_until[name] = self.scene.now() + queue_s
        if self.chances.on and self.queue.random() < 0.2:
            self.chances.count_fault("end_queued")
            self.scene.call_later(queue_s, self.machines[name].end_machine, "the cluster ends it at once")
        return queue_s

    def look_at(self, name: str) -> FleetNode:
        """Return where a machine is, as its cluster sees it; now and then the cluster does not know."""
        machine, ends_at = self.machines[name], self._ends_at.get(name, 0.0)
        near = (f"switch-{machine.order % 2}",)
        if self._queued_until.get(name, 0.0) > self.scene.now():
            return FleetNode(state=FleetState.QUEUED, reason=self.queue.choice(("Resources", "Priority")))
        if machine.alive and (machine.apart or (self.chances.on and self.queue.random() < 0.05)):
            return FleetNode(state=FleetState.UNKNOWN, reason="not responding", ends_at=ends_at, near=near)
        if not machine.alive:
            failed = machine.order % 3 > 0
            return FleetNode(state=FleetState.GONE, reason="NODE_FAIL" if failed else "CANCELLED", failed=failed)
        if not ends_at and self.chances.on and self.queue.random() < 0.01:
            ends_at = self._ends_at[name] = self.scene.now() + self.queue.uniform(5.0, 100.0)
            self.chances.count_fault("preempt")
            self.scene.call_later(ends_at - self.scene.now(), machine.end_machine, "the cluster takes it away")
        state = FleetState.UP if machine.lives else FleetState.STARTING
        return FleetNode(state=state, ends_at=ends_at, near=near)


class SimFleet:
    """One controller's access to the machine pool."""

    def __init__(self, cloud: MachinePool, strike: Callable[[str], None]) -> None:
        self.can_acquire = cloud.scene.setup.job.can_acquire
        self.survey_s = 1.0 if self.can_acquire and cloud.scene.setup.surveys else 0.0
        self._scene = cloud.scene
        self._cloud = cloud
        self._strike = strike

    def nodes(self) -> tuple[str, ...]:
        return tuple(self._cloud.nodes) if self.can_acquire else ()

    def departures(self) -> tuple[Departure, ...]:
        return ()  # the disks of machines that have left are out of reach

    async def acquire(self, count: int, evicted: Collection[str] = ()) -> tuple[str, ...]:
        if not self.can_acquire:
            raise OSError("this fleet cannot start nodes")
        await asyncio.sleep(self._scene.rng.uniform(0.05, 2.0))
        if self._cloud.chances.draw_chance(0.15):
            raise OSError("no machines left")
        self._strike("acquiring")
        given = self._scene.rng.randint(1, count) if self._cloud.chances.draw_chance(0.15) else count
        names = tuple(self._cloud.make_machine() for _ in range(given))
        self._cloud.nodes += names
        self._scene.log_line(f"the fleet gives {', '.join(names)}")
        self._strike("acquired")
        return names

    async def give_back(self, node: str, reason: str, cause: Dismissal = Dismissal.UNTOLD) -> None:
        await asyncio.sleep(self._scene.rng.uniform(0.01, 0.5))
        if not self.can_acquire:
            return
        self._strike("releasing")
        machine = self._cloud.machines.get(node)
        if node in self._cloud.nodes:
            self._cloud.nodes.remove(node)
        if machine and machine.alive and machine.apart:
            await self._end_out_of_reach(machine)
        elif machine:
            machine.end_machine(f"given back: {reason}")

    async def survey(self) -> dict[str, FleetNode]:
        await asyncio.sleep(self._cloud.queue.uniform(0.01, 0.5))
        if self._cloud.chances.on and self._cloud.queue.random() < 0.1:
            raise OSError("the cluster does not answer")
        return {node: self._cloud.look_at(node) for node in self._cloud.nodes}

    async def _end_out_of_reach(self, machine: SimMachine) -> None:
        """End a machine that the fleet cannot reach; this takes a while. With chance one half raise OSError at once,
        otherwise wait until the machine has ended."""
        takes_s = self._scene.rng.uniform(0.0, 30.0)
        self._scene.call_later(takes_s, machine.end_machine, "the fleet has ended it at last")
        if self._scene.rng.random() < 0.5:
            raise OSError("the platform cannot reach it")
        await asyncio.sleep(takes_s + 0.1)


class SimStore:
    host = "store"

    async def open(self, generation: int) -> int:
        await asyncio.sleep(0.01)
        return 7000

    async def quit(self) -> None:
        pass
