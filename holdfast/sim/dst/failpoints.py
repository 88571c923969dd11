"""Faults at named points: at each point the simulated world asks FaultChances whether a fault strikes now."""

from random import Random

from holdfast.sim.dst.seed_scene import SeedScene
from holdfast.sim.dst.simulated_link import SimLink
from holdfast.sim.dst.simulated_machine import SimMachine


class FaultChances:
    def __init__(self, scene: SeedScene) -> None:
        self.scene = scene
        self.on = False
        self.struck: dict[str, int] = {}
        self.armed: dict[str, str] = {}  # machine -> where its agent will die
        self.aside = Random(f"aside {scene.setup.seed}")  # so that all else of a seed stays as it was

    def count_fault(self, kind: str) -> None:
        self.struck[kind] = self.struck.get(kind, 0) + 1

    def draw_chance(self, probability: float) -> bool:
        return self.on and self.scene.rng.random() < probability

    def launch_error(self) -> str:
        return "its log folder cannot be made" if self.draw_chance(0.04) else ""

    def launch_delay_s(self) -> float:
        """Return how long a node waits before it starts ranks: usually 0, sometimes seconds, as if importing torch."""
        slow = self.on and self.aside.random() < 0.1
        return self.aside.uniform(0.5, 4.0) if slow else 0.0

    def kills_agent_at(self, machine: SimMachine, point: str) -> bool:
        """Kill the machine's agent and return True, if a fault was planned for this point; otherwise return False."""
        if self.armed.get(machine.name) != point:
            return False
        del self.armed[machine.name]
        machine.kill_agent()
        return True

    def on_linked(self, machine: SimMachine, link: SimLink) -> None:
        """In setups with `stalls_hellos`, sometimes stall a new link and kill its agent. The next agent's hello may
        then arrive before the stalled one."""
        if self.on and self.scene.setup.stalls_hellos and self.aside.random() < 0.3:
            self.count_fault("stall_hello")
            link.stall_packets(self.aside.uniform(1.0, 5.0))
            self.scene.call_later(0.1, machine.kill_agent)

    def on_leaving(self, machine: SimMachine) -> None:
        """With chance one half, kill the agent while its node leaves; random faults rarely strike at that time."""
        if self.on and self.aside.random() < 0.5:
            self.count_fault("kill_leaving")
            self.scene.call_later(self.aside.uniform(0.0, 1.0), machine.kill_agent)

    def on_noted(self, machine: SimMachine, *, busy: bool) -> None:
        """Perhaps cut the power of a machine that has noted an errand on its disk while `busy` with another errand. The
        chance is one half, or zero if the job can acquire nodes."""
        if self.on and busy and not self.scene.setup.job.can_acquire and self.aside.random() < 0.5:
            self.count_fault("lose_noted")
            machine.reboot()
