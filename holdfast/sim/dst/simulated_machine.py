"""A simulated machine: its clock, disk, snapshot memory, ranks, and the agent that comes and goes."""

from typing import TYPE_CHECKING

import msgspec

from holdfast.model.errand import Done, LaunchHere, Leave
from holdfast.sim.dst.simulated_agent import SimAgent
from holdfast.sim.dst.simulated_keeper import HolderMemory

if TYPE_CHECKING:
    from holdfast.sim.dst.dst_world import DstWorld

_AGENT_S = 0.3  # until the holder has a new one


class SimRank(msgspec.Struct, kw_only=True):
    """A rank's process, and what its progress slot last reported."""

    generation: int
    rank: int
    machine: "SimMachine"
    world: int
    release: int
    code: int | None = None
    ended_mono: float = 0.0
    words: tuple[str, ...] = ()
    hung: bool = False
    unkillable: bool = False
    killed: bool = False  # it dies as soon as it can
    step: int = -1
    stepped_mono: float = 0.0
    first_step: int = -1
    first_mono: float = 0.0
    nan_since: int = -1  # the first step whose loss was not finite

    @property
    def is_healthy(self) -> bool:
        return self.code is None and not (self.hung or self.killed) and self.machine.is_connected


class NodeDisk:
    """The notes that outlive an agent; after a power loss only synced ones remain."""

    def __init__(self) -> None:
        self.done: list[Done] = []  # synced
        self.stopped = 0
        self.launch: LaunchHere | None = None
        self.alone: float | None = None  # since when there is no controller, by the steady clock
        self.leaving: Leave | None = None  # begun, and not come to its end
        self.epoch = 0  # newest controller that was heard
        self.full = False  # nothing can be written

    def write_done(self, done: Done) -> None:
        if not self.full:
            self.done.append(done)

    def write_epoch(self, epoch: int) -> None:
        if not self.full:
            self.epoch = epoch

    def write_stopped(self, generation: int) -> None:
        if not self.full:
            self.stopped = generation

    def write_leaving(self, errand: Leave) -> None:
        if not self.full:
            self.leaving = errand

    def write_launch(self, errand: LaunchHere) -> str:
        """Note a launch; return why it cannot be noted, empty if it could."""
        self.launch = self.launch if self.full else errand
        return "what is launched cannot be written" if self.full else ""

    def write_parting(self, now: float) -> float:
        """Return since when there has been no controller; note it unless the disk is full."""
        if self.alone is None and not self.full:
            self.alone = now
        return now if self.alone is None else self.alone

    def lose_power(self) -> None:
        self.stopped, self.launch, self.alone, self.leaving, self.epoch = 0, None, None, None, 0


class MachineClock:
    """A machine's monotonic and wall clocks: both drift alike, and the wall clock can be set."""

    def __init__(self, world: "DstWorld") -> None:
        rng = world.rng
        self._loop = world.loop
        self._rate = 1.0 + rng.uniform(-1e-3, 1e-3)
        self._boot = rng.uniform(0.0, 1e5)
        self._set = rng.uniform(-50.0, 50.0)

    def mono(self) -> float:
        return self._boot + self._loop.time() * self._rate

    def wall(self) -> float:
        return self.mono() + self._set

    def jump_wall(self, by_s: float) -> None:
        self._set += by_s


class SimMachine:
    def __init__(self, world: "DstWorld", name: str, order: int) -> None:
        self.world = world
        self.name = name
        self.order = order
        self.clock = MachineClock(world)
        self.disk = NodeDisk()
        self.memory = HolderMemory()
        self.held: dict[tuple[int, int], SimRank] = {}
        self.alive = True
        self.cut = False  # the controller cannot be reached
        self.apart = False  # nor can other machines
        self.buried = False  # cut off, with a full disk, for longer than any fence stands
        self.warm = False
        self.releases: set[int] = set()  # whose code is here
        self.agent: SimAgent | None = None
        self.lives = 0  # agents so far
        self.leaves = False  # one of them has begun to

    @property
    def is_connected(self) -> bool:
        """Whether this machine can reach the machines of other ranks."""
        return self.alive and not self.apart

    def running_ranks(self, up_to: int | None = None) -> list[SimRank]:
        return [h for h in self.held.values() if h.code is None and (up_to is None or h.generation <= up_to)]

    # --- the holder --------------------------------------------------------------------------------------------

    def boot(self) -> None:
        if self.alive:
            self.start_agent()
            self.world.call_later(self.world.rng.uniform(0.1, 2.0), self._on_warm)

    def _on_warm(self) -> None:
        if self.alive and not self.warm:
            self.warm = True
            if self.agent:
                self.agent.say_hello()

    def start_agent(self) -> None:
        if self.alive and self.agent is None:
            self.lives += 1
            self.agent = SimAgent(self)
            self.agent.run()

    def kill_agent(self) -> None:
        if self.agent:
            self.world.log_line(f"{self.name}: the agent is killed")
            self.agent.end_process()
            self.agent = None
            self.world.call_later(_AGENT_S + self.world.rng.random(), self.start_agent)

    def start_rank(self, errand: LaunchHere, rank: int) -> str:
        """Fork a rank's process; return an error in words, empty if there is none."""
        key = (errand.generation, rank)
        if key in self.held:
            return ""  # an earlier agent got this far with the same errand
        held = SimRank(
            generation=errand.generation,
            rank=rank,
            machine=self,
            world=errand.world_size,
            release=errand.release.number,
        )
        self.world.truth.on_rank_start(held, self.running_ranks())
        self.held[key] = held
        self.world.teams.on_rank_start(held, errand)
        return ""

    def end_rank(self, held: SimRank, code: int, words: tuple[str, ...] = ()) -> None:
        if held.code is None:
            held.code, held.words = code, words
            held.ended_mono = self.clock.mono()
            self.world.teams.on_rank_end(held)
            if self.agent:
                self.agent.on_rank_exit(held)

    def forget_ranks(self, below: int) -> None:
        self.held = {key: h for key, h in self.held.items() if h.code is None or h.generation >= below}

    # --- the end of it -----------------------------------------------------------------------------------------

    def end_holder(self, errand: int) -> None:
        """End the holder and everything below it; without a fleet, a person restarts a machine that left unasked."""
        self.end_machine("it leaves")
        if errand == 0 and not self.world.setup.job.can_acquire:  # it found nobody; a person starts it again
            self.disk.lose_power()
            self.memory, self.held, self.warm = HolderMemory(), {}, False
            self.world.call_later(self.world.rng.uniform(2.0, 20.0), self._boot_again)

    def end_machine(self, why: str) -> None:
        if not self.alive:
            return
        self.world.log_line(f"{self.name}: {why}")
        self.alive = self.leaves = False
        if self.agent:
            self.agent.end_process()
            self.agent = None
        for held in list(self.running_ranks()):
            held.code = -9
            self.world.teams.on_rank_end(held)

    def reboot(self) -> None:
        """Lose power and boot again: nothing in memory survives."""
        self.end_machine("it loses power")
        self.disk.lose_power()
        self.memory, self.held, self.warm = HolderMemory(), {}, False
        self.world.call_later(self.world.rng.choice((0.3, 1.0, 5.0, 30.0)), self._boot_again)

    def _boot_again(self) -> None:
        if not self.alive and not self.world.over:
            self.world.log_line(f"{self.name}: it is started anew")
            self.alive = True
            self.boot()
