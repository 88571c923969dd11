"""A simulated machine: its clock, disk, snapshot memory, ranks, and the agent that comes and goes."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from holdfast.checkpoint.disk_state_record import DiskState
from holdfast.checkpoint.manifest import Author
from holdfast.checkpoint.peer_server import PeerShelf
from holdfast.core.agent_state_machine import OWN
from holdfast.core.incident.alarm_rate_limit import RepeatFilter
from holdfast.model.node_errands import LaunchHere
from holdfast.sim.dst.seed_scene import SeedScene
from holdfast.sim.dst.simulated_holder_memory import HolderMemory
from holdfast.sim.dst.simulated_link import SimLink
from holdfast.sim.dst.simulated_node_disk import NodeDisk
from holdfast.wire.holder_messages import HolderRank, RankEnded, RankKey, ZygoteWarmed
from holdfast.wire.rank_keeper_messages import FromKeeper
from holdfast.wire.rank_memory.slot_reader import SlotReading

_AGENT_S = 0.3  # until the holder has a new one


class SimRank(msgspec.Struct, kw_only=True):
    """A rank's process, and the content of its progress slot."""

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
    parked: bool = False  # it has left its generation and waits for the next one
    step: int = -1
    stepped_mono: float = 0.0
    first_step: int = -1
    first_mono: float = 0.0
    nan_since: int = -1  # the first step whose loss was not finite
    _reading: SlotReading | None = None

    @property
    def pid(self) -> int:
        return self.rank + 1

    def make_step(self, step: int, now: float, *, finite: bool) -> None:
        """Write a step to the slot."""
        self.step, self.stepped_mono, self._reading = step, now, None
        if self.first_step < 0:
            self.first_step, self.first_mono = step, now
        if not finite and self.nan_since < 0:
            self.nan_since = step

    def describe_rank(self) -> HolderRank:
        key = str(RankKey(self.generation, self.rank))
        return HolderRank(key=key, pid=self.pid, code=self.code, at=self.ended_mono)

    def read_slot(self) -> SlotReading:
        if self._reading is None:
            self._reading = self._make_reading()
        return self._reading

    def _make_reading(self) -> SlotReading:
        return SlotReading(
            seq=self.step + 2,
            generation=self.generation,
            rank=self.rank,
            pid=self.pid,
            step=self.step,
            counted=False,
            at=self.stepped_mono,
            first_step=self.first_step,
            first_at=self.first_mono,
            loss=None if self.step < 0 else 1.0 if self.nan_since < 0 else float("nan"),
            grad_norm=None,
            loss_step=self.step,
            first_bad_step=self.nan_since,
            lasting_bad_step=self.nan_since if self.step > self.nan_since else -1,
            phase="",
            phase_at=0.0,
            failed=False,
            failed_at=0.0,
            failure="",
            grouped_at=0.0,
            restored_at=0.0,
            skippable=False,
            skipped=0,
            skipped_samples=0,
            origin=-1,
            survives=self.machine.scene.setup.survives,
        )

    @property
    def is_healthy(self) -> bool:
        return self.code is None and not (self.hung or self.killed or self.parked) and self.machine.is_connected


class RankListener(Protocol):
    """Is notified when ranks start and end."""

    def on_rank_start(self, held: SimRank) -> None: ...

    def on_rank_end(self, held: SimRank) -> None: ...


class KeeperAccess(Protocol):
    """The part of a keeper that ranks and other machines' keepers call."""

    shelf: PeerShelf | None

    async def ask_keeper(self, line: bytes) -> FromKeeper | None: ...


class PublishedSteps(Protocol):
    """The part of an agent's checkpoint writer that simulated storage calls when a step is published."""

    author: Author

    def note_published(self, step: int) -> None: ...


class KeptState(NamedTuple):
    """A rank's state on disk."""

    state: DiskState
    image: bytes


class MachineAgent(Protocol):
    """An agent's process, as its machine and other machines see it."""

    alive: bool
    link: SimLink | None
    persisting: PublishedSteps

    @property
    def links(self) -> KeeperAccess: ...

    def hear_holder(self, message: RankEnded | ZygoteWarmed) -> None: ...

    def read_health(self) -> None: ...

    def end_process(self) -> None: ...


class MachineClock:
    """A machine's monotonic and wall clocks. Both drift at the same rate, and the wall clock can jump."""

    def __init__(self, scene: SeedScene) -> None:
        rng = scene.rng
        self._loop = scene.loop
        self._rate = 1.0 + rng.uniform(-1e-3, 1e-3)
        self._boot = rng.uniform(0.0, 1e5)
        self._set = rng.uniform(-50.0, 50.0)

    def monotonic(self) -> float:
        return self._boot + self._loop.time() * self._rate

    def wall(self) -> float:
        return self.monotonic() + self._set

    def jump_wall(self, by_s: float) -> None:
        self._set += by_s


class SimMachine:
    def __init__(
        self,
        scene: SeedScene,
        name: str,
        order: int,
        ranks: RankListener,
        make_agent: Callable[["SimMachine"], MachineAgent],
    ) -> None:
        self.scene = scene
        self._ranks = ranks
        self._make_agent = make_agent
        self.name = name
        self.order = order
        self.clock = MachineClock(scene)
        self.disk = NodeDisk()
        self.memory = HolderMemory()
        self.states: list[KeptState] = []  # on disk
        self.held: dict[RankKey, SimRank] = {}
        self.alive = True
        self.cut = False  # the controller cannot be reached
        self.apart = False  # nor can other machines
        self.link_is_down = False  # to the ranks of others: agents still reach the controller
        self.link_alarms = RepeatFilter()  # beyond an agent: a second alarm would rightly end a job without standbys
        self.buried = False  # cut off, with a full disk, for longer than any fence stands
        self.warm = False
        self.agent: MachineAgent | None = None
        self.lives = 0  # agents so far
        self.leaves = False  # one of them has begun to
        self.left_by = 0  # the errand by which it has left

    @property
    def is_connected(self) -> bool:
        """Return whether this machine can reach other machines of the job."""
        return self.alive and not self.apart

    def running_ranks(self, up_to: int | None = None) -> list[SimRank]:
        return [h for h in self.held.values() if h.code is None and (up_to is None or h.generation <= up_to)]

    # --- the holder --------------------------------------------------------------------------------------------

    def boot(self) -> None:
        if self.alive:
            self.start_agent()
            self.scene.call_later(self.scene.rng.uniform(0.1, 2.0), self._on_warm)

    def _on_warm(self) -> None:
        if self.alive and not self.warm:
            self.warm = True
            self._tell_agent(ZygoteWarmed(ok=True))

    def _tell_agent(self, message: RankEnded | ZygoteWarmed) -> None:
        if self.agent:
            self.agent.hear_holder(message)

    def start_agent(self) -> None:
        if self.alive and self.agent is None:
            self.lives += 1
            self.memory.release_pins()  # once more: a dead agent's code may have run a little longer
            self.agent = self._make_agent(self)

    def kill_agent(self) -> None:
        if self.agent:
            self.scene.log_line(f"{self.name}: the agent is killed")
            self.agent.end_process()
            self.agent = None
            self.memory.release_pins()
            self.scene.call_later(_AGENT_S + self.scene.rng.random(), self.start_agent)

    def start_rank(self, errand: LaunchHere, key: RankKey) -> SimRank:
        """Fork a rank's process."""
        return self._enter_generation(errand.world_size, errand.release.number, key)

    def _enter_generation(self, world: int, release: int, key: RankKey) -> SimRank:
        held = SimRank(generation=key.generation, rank=key.rank, machine=self, world=world, release=release)
        self.held[key] = held
        self._ranks.on_rank_start(held)
        return held

    def park_rank(self, held: SimRank) -> None:
        """Have a rank leave its generation; to the generation's other ranks, it has ended."""
        held.parked = True
        self._ranks.on_rank_end(held)

    def rejoin_rank(self, held: SimRank, key: RankKey) -> SimRank:
        """Let a parked rank go on in its process, as a rank of another generation."""
        del self.held[RankKey(held.generation, held.rank)]
        held.code = 0  # what is still under way for the generation that it left does not concern its process
        return self._enter_generation(held.world, held.release, key)  # it runs what it ran

    def end_rank(self, held: SimRank, code: int, words: tuple[str, ...] = ()) -> None:
        if held.code is None:
            held.code, held.words = code, words
            held.ended_mono = self.clock.monotonic()
            self._ranks.on_rank_end(held)
            self._tell_agent(RankEnded(rank=held.describe_rank()))

    def forget_ranks(self, below: int) -> None:
        self.held = {key: h for key, h in self.held.items() if h.code is None or h.generation >= below}

    # --- the end of it -----------------------------------------------------------------------------------------

    def end_holder(self) -> None:
        """End the holder and all processes below it. If the machine left the job by its own decision and the job cannot
        acquire nodes, boot the machine again later."""
        self.end_machine("it leaves")
        if self.left_by == OWN and not self.scene.setup.job.can_acquire:  # it found nobody; a person starts it again
            self._lose_power()
            self.scene.call_later(self.scene.rng.uniform(2.0, 20.0), self._boot_again)

    def end_machine(self, why: str) -> None:
        if not self.alive:
            return
        self.scene.log_line(f"{self.name}: {why}")
        self.alive = self.leaves = False
        if self.agent:
            self.agent.end_process()
            self.agent = None
        for held in list(self.running_ranks()):
            held.code = -9
            self._ranks.on_rank_end(held)
        self.memory.lose_all()

    def reboot(self) -> None:
        """Lose power and boot again: nothing in memory survives."""
        self.end_machine("it loses power")
        self._lose_power()
        self.scene.call_later(self.scene.rng.choice((0.3, 1.0, 5.0, 30.0)), self._boot_again)

    def _lose_power(self) -> None:
        self.disk.lose_power()
        self.held, self.warm = {}, False

    def _boot_again(self) -> None:
        if not self.alive and not self.scene.over:
            self.scene.log_line(f"{self.name}: it is started anew")
            self.alive = True
            self.boot()
