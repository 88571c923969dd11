"""A machine: its clock, its disk, the memory and the ranks that its holder keeps, and the agent that comes and goes."""

from typing import TYPE_CHECKING

import msgspec

from holdfast.model.errand import Done, LaunchHere, Leave
from holdfast.sim.dst.agent import Agent
from holdfast.sim.dst.keeper import Memory

if TYPE_CHECKING:
    from holdfast.sim.dst.world import World

_AGENT_S = 0.3  # until the holder has a new one


class Held(msgspec.Struct, kw_only=True):
    """A rank's process, and what it last told through its slot."""

    generation: int
    rank: int
    machine: "Machine"
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
    def healthy(self) -> bool:
        return self.code is None and not (self.hung or self.killed) and self.machine.connected


class NodeDisk:
    """What outlives an agent; after a loss of power only what was synced is there."""

    def __init__(self) -> None:
        self.done: list[Done] = []  # synced
        self.stopped = 0
        self.launch: LaunchHere | None = None
        self.alone: float | None = None  # since when there is no controller, by the steady clock
        self.leaving: Leave | None = None  # begun, and not come to its end
        self.epoch = 0  # newest controller that was heard
        self.full = False  # nothing can be written

    def remember(self, done: Done) -> None:
        if not self.full:
            self.done.append(done)

    def heed(self, epoch: int) -> None:
        if not self.full:
            self.epoch = epoch

    def stop(self, generation: int) -> None:
        if not self.full:
            self.stopped = generation

    def intend(self, errand: Leave) -> None:
        if not self.full:
            self.leaving = errand

    def launched(self, errand: LaunchHere) -> str:
        """Why it cannot be noted, if it cannot."""
        self.launch = self.launch if self.full else errand
        return "what is launched cannot be written" if self.full else ""

    def parted(self, now: float) -> float:
        """Since when there is no controller, as far as that could be written down."""
        if self.alone is None and not self.full:
            self.alone = now
        return now if self.alone is None else self.alone

    def lose_power(self) -> None:
        self.stopped, self.launch, self.alone, self.leaving, self.epoch = 0, None, None, None, 0


class Clock:
    """Two clocks that drift alike; one of them jumps when somebody sets it."""

    def __init__(self, world: "World") -> None:
        rng = world.rng
        self._loop = world.loop
        self._rate = 1.0 + rng.uniform(-1e-3, 1e-3)
        self._boot = rng.uniform(0.0, 1e5)
        self._set = rng.uniform(-50.0, 50.0)

    def mono(self) -> float:
        return self._boot + self._loop.time() * self._rate

    def wall(self) -> float:
        return self.mono() + self._set

    def jump(self, by_s: float) -> None:
        self._set += by_s


class Machine:
    def __init__(self, world: "World", name: str, order: int) -> None:
        self.world = world
        self.name = name
        self.order = order
        self.clock = Clock(world)
        self.disk = NodeDisk()
        self.memory = Memory()
        self.held: dict[tuple[int, int], Held] = {}
        self.alive = True
        self.cut = False  # the controller cannot be reached
        self.apart = False  # nor can other machines
        self.buried = False  # cut off, with a full disk, for longer than any fence stands
        self.warm = False
        self.releases: set[int] = set()  # whose code is here
        self.agent: Agent | None = None
        self.lives = 0  # agents so far
        self.leaves = False  # one of them has begun to

    @property
    def connected(self) -> bool:
        """With the machines of the other ranks."""
        return self.alive and not self.apart

    def running(self, up_to: int | None = None) -> list[Held]:
        return [h for h in self.held.values() if h.code is None and (up_to is None or h.generation <= up_to)]

    # --- the holder --------------------------------------------------------------------------------------------

    def boot(self) -> None:
        if self.alive:
            self.start_agent()
            self.world.later(self.world.rng.uniform(0.1, 2.0), self._warmed)

    def _warmed(self) -> None:
        if self.alive and not self.warm:
            self.warm = True
            if self.agent:
                self.agent.say_hello()

    def start_agent(self) -> None:
        if self.alive and self.agent is None:
            self.lives += 1
            self.agent = Agent(self)
            self.agent.run()

    def kill_agent(self) -> None:
        if self.agent:
            self.world.note(f"{self.name}: the agent is killed")
            self.agent.end()
            self.agent = None
            self.world.later(_AGENT_S + self.world.rng.random(), self.start_agent)

    def start_rank(self, errand: LaunchHere, rank: int) -> str:
        """A process is forked; an error in words, or nothing."""
        key = (errand.generation, rank)
        if key in self.held:
            return ""  # an earlier agent got this far with the same errand
        held = Held(
            generation=errand.generation,
            rank=rank,
            machine=self,
            world=errand.world_size,
            release=errand.release.number,
        )
        self.world.truth.starts(held, self.running())
        self.held[key] = held
        self.world.teams.joined(held, errand)
        return ""

    def end_rank(self, held: Held, code: int, words: tuple[str, ...] = ()) -> None:
        if held.code is None:
            held.code, held.words = code, words
            held.ended_mono = self.clock.mono()
            self.world.teams.ended(held)
            if self.agent:
                self.agent.over(held)

    def forget(self, below: int) -> None:
        self.held = {key: h for key, h in self.held.items() if h.code is None or h.generation >= below}

    # --- the end of it -----------------------------------------------------------------------------------------

    def quit(self, errand: int) -> None:
        """The holder ends, and nothing below it outlives it."""
        self.die("it leaves")
        if errand == 0 and not self.world.setup.job.can_acquire:  # it found nobody; a person starts it again
            self.disk.lose_power()
            self.memory, self.held, self.warm = Memory(), {}, False
            self.world.later(self.world.rng.uniform(2.0, 20.0), self._back)

    def die(self, why: str) -> None:
        if not self.alive:
            return
        self.world.note(f"{self.name}: {why}")
        self.alive = self.leaves = False
        if self.agent:
            self.agent.end()
            self.agent = None
        for held in list(self.running()):
            held.code = -9
            self.world.teams.ended(held)

    def reboot(self) -> None:
        """The power was lost and is back: of its memory nothing is left."""
        self.die("it loses power")
        self.disk.lose_power()
        self.memory, self.held, self.warm = Memory(), {}, False
        self.world.later(self.world.rng.choice((0.3, 1.0, 5.0, 30.0)), self._back)

    def _back(self) -> None:
        if not self.alive and not self.world.over:
            self.world.note(f"{self.name}: it is started anew")
            self.alive = True
            self.boot()
