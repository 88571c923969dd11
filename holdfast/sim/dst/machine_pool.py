"""The simulated fleet and store; machines live outside of the controller and outlive it."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.model.observation import Departure
from holdfast.sim.dst.simulated_machine import SimMachine

if TYPE_CHECKING:
    from holdfast.sim.dst.dst_world import DstWorld


class MachinePool:
    """The machines that were acquired and not given back."""

    def __init__(self, world: "DstWorld") -> None:
        self.world = world
        self.nodes: list[str] = []
        self._made = 0

    def make_machine(self) -> str:
        """Make a machine that boots after a while, or never; return its name."""
        name, order = f"n{self._made}", self._made
        self._made += 1
        machine = self.world.machines[name] = SimMachine(self.world, name, order)
        if not self.world.faults.draw_chance(0.05):
            self.world.call_later(self.world.rng.uniform(0.2, 4.0), machine.boot)
        return name


class SimFleet:
    """One controller's access to the machine pool."""

    def __init__(self, world: "DstWorld", strike: Callable[[str], None]) -> None:
        self.can_acquire = world.setup.job.can_acquire
        self._world = world
        self._cloud = world.cloud
        self._strike = strike

    def nodes(self) -> tuple[str, ...]:
        return tuple(self._cloud.nodes) if self.can_acquire else ()

    def departures(self) -> tuple[Departure, ...]:
        return ()  # the disks of machines that have left are out of reach

    async def acquire(self, count: int) -> tuple[str, ...]:
        if not self.can_acquire:
            raise OSError("this fleet cannot start nodes")
        await asyncio.sleep(self._world.rng.uniform(0.05, 2.0))
        if self._world.faults.draw_chance(0.15):
            raise OSError("no machines left")
        self._strike("acquiring")
        given = self._world.rng.randint(1, count) if self._world.faults.draw_chance(0.15) else count
        names = tuple(self._cloud.make_machine() for _ in range(given))
        self._cloud.nodes += names
        self._world.log_line(f"the fleet gives {', '.join(names)}")
        self._strike("acquired")
        return names

    async def give_back(self, node: str, reason: str) -> None:
        await asyncio.sleep(self._world.rng.uniform(0.01, 0.5))
        if not self.can_acquire:
            return
        self._strike("releasing")
        machine = self._world.machines.get(node)
        if node in self._cloud.nodes:
            self._cloud.nodes.remove(node)
        if machine and machine.alive and machine.apart:
            await self._end_out_of_reach(machine)
        elif machine:
            machine.end_machine(f"given back: {reason}")

    async def _end_out_of_reach(self, machine: SimMachine) -> None:
        """End an unreachable machine after a delay; in half of the cases raise OSError instead of waiting for it."""
        takes_s = self._world.rng.uniform(0.0, 30.0)
        self._world.call_later(takes_s, machine.end_machine, "the fleet has ended it at last")
        if self._world.rng.random() < 0.5:
            raise OSError("the platform cannot reach it")
        await asyncio.sleep(takes_s + 0.1)


class SimStore:
    host = "store"

    async def open(self, generation: int) -> int:
        await asyncio.sleep(0.01)
        return 7000

    async def quit(self) -> None:
        pass
