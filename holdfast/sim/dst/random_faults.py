"""Random faults of a simulated job, drawn from a seed until they are switched off."""

from random import Random

from holdfast.core.agent_state_machine import fence_s
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Order, OrderVerb
from holdfast.sim.dst.controller_process import ControllerProcess
from holdfast.sim.dst.failpoints import FaultChances
from holdfast.sim.dst.seed_parameters import NOTICE_S
from holdfast.sim.dst.simulated_machine import SimMachine, SimRank
from holdfast.sim.dst.simulated_ranks import RankTeams

_ORDERS: tuple[OrderVerb, ...] = ("update", "update", "rollback", "hold", "evict", "drain", "approve")
_KINDS = {
    "break": 8,  # a link
    "stall": 5,  # a link
    "cut": 6,  # a machine from the controller
    "apart": 4,  # a machine from everybody
    "kill_agent": 6,
    "crash_controller": 8,
    "crash_rank": 7,
    "hang": 2,
    "nan": 2,
    "lose": 4,  # a machine
    "jump": 2,  # a clock
    "unkillable": 4,  # a rank
    "order": 6,  # of a person; no fault, and in the way of all others
}
_POINTS = (  # at which a controller dies
    *("decided", "written", "unflushed", "flushed", "sending", "telling", "telling", "telling"),
    *("acquiring", "acquired", "releasing", "noting", "noted"),
)
_CODES = (-11, -9, -6, 1)


class RandomFaults:
    def __init__(self, chances: FaultChances, teams: RankTeams, office: ControllerProcess) -> None:
        scene = self.scene = chances.scene
        self._chances, self._teams, self._office = chances, teams, office
        self._machines, self._truth = teams.machines, teams.truth
        self._stranding = Random(f"stranded {scene.setup.seed}")  # so that all else of a seed stays as it was
        self._links = Random(f"links {scene.setup.seed}")  # for the same reason
        # Of each seed only some kinds: those that are left come often enough to meet one another.
        kinds = [kind for kind in _KINDS if scene.rng.random() < 0.6] or list(_KINDS)
        self._weights = {kind: _KINDS[kind] * scene.rng.choice((1, 1, 3)) for kind in kinds}

    def start_faults(self) -> None:
        self._chances.on = True
        if self._chances.aside.random() < 0.15:
            self.scene.call_later(self._chances.aside.uniform(5.0, 25.0), self._fill_disk)
        if self._stranding.random() < 0.15:
            self.scene.call_later(self._stranding.uniform(5.0, self.scene.setup.faults_s), self._strand_machine)
        if self.scene.setup.loses_links:
            self._plan_outage()
        self._plan_next()

    def stop_faults(self) -> None:
        """Stop injecting faults, and heal everything that can be healed."""
        self._chances.on = False
        self._chances.armed.clear()
        self._office.armed = ""
        self.scene.call_later(21.0, self._office.give_order, Order(verb="resume", who="somebody"))
        for machine in self._machines.values():
            self._heal_machine(machine)
            self._make_room(machine)
            machine.link_is_down = False
            for held in list(machine.held.values()):
                self._make_killable(held)

    def _fill_disk(self) -> None:
        """Fill a machine's disk; in half of the cases also cut the machine off for longer than a fence lasts."""
        up = [machine for machine in self._machines.values() if machine.alive and machine.running_ranks()]
        if not self._chances.on or not up:
            return
        machine = self._chances.aside.choice(up)
        self.scene.log_line(f"fault: full disk on {machine.name}")
        self._chances.count_fault("full")
        machine.disk.full = True
        if self._chances.aside.random() < 0.5:
            self.scene.call_later(self._chances.aside.choice((5.0, 40.0)), self._make_room, machine)
            return
        machine.cut = machine.buried = True
        if machine.agent and machine.agent.link:
            machine.agent.link.break_link(0.0, 0.0)
        lasts_s = fence_s(self.scene.setup.settings.node)
        self.scene.call_later(lasts_s, self._truth.check_fence, machine, lasts_s)
        self.scene.call_later(lasts_s + 30.0, self._reconnect_machine, machine)

    def _plan_outage(self) -> None:
        self.scene.call_later(self._links.uniform(3.0, 30.0), self._cut_links)

    def _cut_links(self) -> None:
        """Take the links of one or several machines down for a while, and sometimes order a node to drain meanwhile."""
        up = [machine for machine in self._machines.values() if machine.alive]
        if not self._chances.on or self.scene.over or not up:
            return
        struck = self._links.sample(up, min(len(up), self._links.choice((1, 2, 3))))
        self.scene.log_line(f"fault: no link at {', '.join(machine.name for machine in struck)}")
        self._chances.count_fault("links")
        for machine in struck:
            machine.link_is_down = True
            self.scene.call_later(self._links.uniform(2.0, 3.0), self._read_link, machine)
            self.scene.call_later(self._links.choice((1.0, 10.0, 40.0, 250.0)), self._restore_link, machine)
        if self._links.random() < 0.4:
            self._office.give_order(Order(verb="drain", who="somebody", node=self._links.choice(up).name))
        self._plan_outage()

    @staticmethod
    def _read_link(machine: SimMachine) -> None:
        if machine.agent:
            machine.agent.read_health()

    @staticmethod
    def _restore_link(machine: SimMachine) -> None:
        machine.link_is_down = False

    def _strand_machine(self) -> None:
        """Cut a machine off and make its ranks unkillable for a while, as if its kernel were stuck."""
        up = [machine for machine in self._machines.values() if machine.alive and machine.running_ranks()]
        if not self._chances.on or not up:
            return
        machine = self._stranding.choice(up)
        self.scene.log_line(f"fault: stranded {machine.name}")
        self._chances.count_fault("stranded")
        for held in machine.running_ranks():
            held.unkillable = True
            self.scene.call_later(40.0, self._make_killable, held)
        self._cut_machine(machine, apart=False)

    def _reconnect_machine(self, machine: SimMachine) -> None:
        machine.buried = False
        self._heal_machine(machine)
        self._make_room(machine)

    @staticmethod
    def _make_room(machine: SimMachine) -> None:
        machine.disk.full = machine.buried

    def _plan_next(self) -> None:
        self.scene.call_later(self.scene.rng.expovariate(1 / self.scene.setup.pause_s), self._strike_any)

    def _strike_any(self) -> None:
        if not self._chances.on or self.scene.over:
            return
        rng = self.scene.rng
        (kind,) = rng.choices(list(self._weights), list(self._weights.values()))
        up = [machine for machine in self._machines.values() if machine.alive]
        if kind == "crash_controller":
            self._crash_controller()
        elif up:
            self._hit_machine(kind, rng.choice(up))
        self._plan_next()

    def _crash_controller(self) -> None:
        office, rng = self._office, self.scene.rng
        self._chances.count_fault("crash_controller")
        if rng.random() < 0.4:
            office.crash_controller("killed")
        else:
            office.armed = rng.choice(_POINTS)

    def _hit_machine(self, kind: str, machine: SimMachine) -> None:
        rng, ranks = self.scene.rng, machine.running_ranks()
        self.scene.log_line(f"fault: {kind} on {machine.name}")
        self._chances.count_fault(kind)
        link = machine.agent.link if machine.agent else None
        match kind:
            case "break" if link:
                link.break_link(rng.choice((0.0, 0.5, 3.0)), rng.choice((0.0, 0.5, 3.0, NOTICE_S)))
            case "stall" if link:
                link.stall_packets(rng.uniform(0.5, 5.0))
            case "cut":
                self._cut_machine(machine, apart=False)
            case "apart":
                self._cut_machine(machine, apart=True)
            case "kill_agent":
                self._kill_agent(machine)
            case "crash_rank" if ranks:
                machine.end_rank(rng.choice(ranks), rng.choice(_CODES))
            case "hang" if ranks:
                self._hang_rank(rng.choice(ranks))
            case "unkillable" if ranks:
                self._make_unkillable(rng.choice(ranks))
            case "order":
                self._give_order(machine.name)
            case "nan":
                self._spoil_loss()
            case "lose":
                self._lose_machine(machine)
            case "jump":
                machine.clock.jump_wall(rng.choice((-3600.0, -40.0, 40.0, 3600.0)))

    def _hang_rank(self, held: SimRank) -> None:
        """Hang this rank; if it hangs already, let it go on instead. Only one rank at a time hangs, and none that is
        alone in its generation."""
        team = self._teams.all[held.generation]
        held.hung = team.size > 1 and not any(other.hung for other in team.members.values())

    def _give_order(self, node: str) -> None:
        rng, office = self.scene.rng, self._office
        verb = rng.choice(_ORDERS)
        if verb == "evict" and office.is_fenced(node) and self._machines[node].running_ranks():
            return  # to say so would be to say that they are dead
        release = Release(number=0, digest=f"{rng.randrange(1 << 30):x}") if verb == "update" else None
        office.give_order(
            Order(verb=verb, who="somebody", node=node, release=release, now=rng.random() < 0.5, window_s=20.0)
        )
        if verb == "hold":
            self.scene.call_later(rng.choice((1.0, 5.0, 20.0)), office.give_order, Order(verb="resume", who="somebody"))

    def _make_unkillable(self, held: SimRank) -> None:
        """Make a rank immune to signals for a while, as if stuck in the kernel, and hang it."""
        held.unkillable = True
        self._hang_rank(held)
        self.scene.call_later(self.scene.rng.choice((5.0, 40.0, 80.0)), self._make_killable, held)

    @staticmethod
    def _make_killable(held: SimRank) -> None:
        held.unkillable = False
        if held.killed and held.machine.alive:  # the signal was waiting for this
            held.machine.end_rank(held, -9)

    def _kill_agent(self, machine: SimMachine) -> None:
        if self.scene.rng.random() < 0.5:
            machine.kill_agent()
        else:
            self._chances.armed[machine.name] = self.scene.rng.choice(("carried", "remembered"))

    def _cut_machine(self, machine: SimMachine, *, apart: bool) -> None:
        rng = self.scene.rng
        machine.cut, machine.apart = True, machine.apart or apart
        if machine.agent and machine.agent.link:
            machine.agent.link.break_link(rng.choice((0.0, 2.0, NOTICE_S)), rng.choice((0.0, 2.0, NOTICE_S)))
        self.scene.call_later(rng.choice((1.0, 4.0, 9.0, 30.0)), self._heal_machine, machine)

    @staticmethod
    def _heal_machine(machine: SimMachine) -> None:
        machine.cut, machine.apart = machine.buried, False

    def _spoil_loss(self) -> None:
        for team in self._teams.training_teams():
            if team.nan_at < 0:
                team.nan_at = team.step + 1 + self.scene.rng.randrange(3)
                team.spoilt_at = team.nan_at - self.scene.rng.choice((0, 0, 1, 2))

    def _lose_machine(self, machine: SimMachine) -> None:
        if self.scene.setup.job.can_acquire:
            machine.end_machine("it is lost")
        else:
            machine.reboot()
