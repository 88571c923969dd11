"""The ranks of each generation: they meet, take up a state, and make steps together for as long as all are well."""

from typing import TYPE_CHECKING

import msgspec

from holdfast.model.errand import LaunchHere
from holdfast.sim.dst.keeper import Keeper, Snap

if TYPE_CHECKING:
    from holdfast.sim.dst.machine import Held
    from holdfast.sim.dst.world import World

ECHO = "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.7]:24017"
_GROUP_S = 0.5
_TRIES = 20  # to meet: then they give up


class Storage:
    """Checkpoints that everybody sees; once a generation has published, no older one can."""

    def __init__(self) -> None:
        self.kept: dict[int, Snap] = {}
        self.owner = 0

    def publish(self, generation: int, snap: Snap) -> bool:
        if generation < self.owner:
            return False
        self.owner = generation
        self.kept[snap.step] = snap
        return True


class Team:
    """One generation."""

    def __init__(self, world: "World", generation: int, size: int) -> None:
        self.world = world
        self.generation = generation
        self.size = size
        self.members: dict[int, Held] = {}
        self.launches: dict[int, LaunchHere] = {}
        self.step = -1  # the last that all ranks have made
        self.spoilt_at = -1  # the first step of a state that leads to NaN
        self.nan_at = -1  # the step at which the loss shows it
        self.broken = False
        self.ending = False
        self._tries = 0

    @property
    def formed(self) -> bool:
        return self.step >= 0

    def meet(self) -> None:
        """Process groups, then state; nobody goes on before all are there."""
        if self.broken or self.formed or len(self.members) < self.size:
            return
        self._tries += 1
        if any(held.code is not None for held in self.members.values()):
            return
        agents = [held.machine.agent for held in self.members.values()]
        if not all(held.healthy for held in self.members.values()) or None in agents:
            if self._tries < _TRIES:
                self.world.later(1.0, self.meet)
            return
        picks = {rank: self._resume(held) for rank, held in self.members.items()}
        denied = [rank for rank, pick in picks.items() if isinstance(pick, str)]
        for rank in denied:
            held = self.members[rank]
            held.machine.end_rank(held, 1, (f"holdfast.checkpoint.state.StateError: {picks[rank]}",))
        if not denied:
            self._begin({rank: pick for rank, pick in picks.items() if not isinstance(pick, str)})

    def _begin(self, picks: dict[int, Snap | None]) -> None:
        memory = any(self._keeper(held).source(held.rank) for held in self.members.values())
        self.world.truth.restored(self, picks, memory)
        snap = next(iter(picks.values()))
        self.step = snap.step if snap else 0
        if snap and snap.nan_at >= 0:
            self.spoilt_at, self.nan_at = snap.step, snap.nan_at
        self.world.later(self.world.setup.step_s, self.advance)

    @staticmethod
    def _keeper(held: "Held") -> Keeper:
        assert held.machine.agent is not None
        return held.machine.agent.keeper

    def _resume(self, held: "Held") -> Snap | str | None:
        """What the keeper says to a rank; a reason in words where it has to refuse."""
        keeper, rank = self._keeper(held), held.rank
        if keeper.generation != self.generation:
            return f"generation {self.generation} is over; the node runs {keeper.generation}"
        source = keeper.source(rank)
        if source is None:
            return self._find()
        step = keeper.restore.step
        snap = keeper.own(rank) if source.own else self._gathered(held, source.nodes, step)
        if snap is None:
            return f"the snapshot of step {step} is gone"
        if not source.own:
            snap = msgspec.structs.replace(snap, label=self.generation - 1, verified=False)
            held.machine.memory.take(rank, self.size, snap, keeper.pinned(rank))
        held.machine.memory.own[rank].drop_after(step)
        return snap

    def _gathered(self, held: "Held", nodes: tuple[str, ...], step: int) -> Snap | None:
        for name in nodes:
            there = self.world.machines.get(name)
            if there and there.connected and there.agent and (snap := there.agent.keeper.give(held.rank, step)):
                return snap
        return None

    def _find(self) -> Snap | None:
        """The newest checkpoint that is not doubted; rank 0 says which."""
        first = self.members[min(self.members)]
        doubts = self._keeper(first).restore.doubts
        sound = [
            snap
            for snap in self.world.storage.kept.values()
            if not any(snap.label <= doubt.generation and snap.step > doubt.not_after for doubt in doubts)
        ]
        return max(sound, key=lambda snap: snap.step, default=None)

    # --- steps -------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        if self.broken or self.ending or self.world.over:
            return
        if all(held.healthy for held in self.members.values()):
            last = self.world.setup.last_step
            if not last or self.step < last:
                self._make(self.step + 1, list(self.members.values()))
                self.step += 1
                self.world.truth.stepped(self)
                self._store()
            if last and self.step >= last:
                self._end_well()
                return
        self.world.later(self.world.setup.step_s * self.world.rng.uniform(0.9, 1.1), self.advance)

    def _make(self, step: int, who: "list[Held]") -> None:
        for held in who:
            clock = held.machine.clock
            held.step, held.stepped_mono = step, clock.mono()
            if held.first_step < 0:
                held.first_step, held.first_mono = step, clock.mono()
            if 0 <= self.nan_at <= step and held.nan_since < 0:
                held.nan_since = step
            if held.nan_since < 0:
                snap = self._snap(step)
                agent = held.machine.agent
                held.machine.memory.take(held.rank, self.size, snap, agent.keeper.pinned(held.rank) if agent else ())

    def _snap(self, step: int) -> Snap:
        nan_at = self.nan_at if 0 <= self.spoilt_at <= step else -1
        return Snap(step=step, label=self.generation, made=self.generation, nan_at=nan_at)

    def _store(self) -> None:
        every = self.world.setup.save_steps
        if every and self.step % every == 0 and not 0 <= self.nan_at <= self.step:
            self.world.later(self.world.rng.uniform(0.2, 3.0), self._publish, self._snap(self.step))

    def _publish(self, snap: Snap) -> None:
        agents = [held.machine.agent for held in self.members.values()]
        together = all(agent and agent.keeper.generation == self.generation for agent in agents)
        if together and self.world.storage.publish(self.generation, snap):
            keeper = self._keeper(self.members[0])
            keeper.stored = max(keeper.stored, snap.step)

    def _end_well(self) -> None:
        self.ending = True
        for held in self.members.values():
            self.world.later(self.world.rng.uniform(0.0, 1.0), held.machine.end_rank, held, 0)

    def ended(self, held: "Held") -> None:
        """One of them is gone: some may have come a step further, and some notice."""
        if self.broken or (self.ending and held.code == 0):
            return
        self.broken = True
        rng = self.world.rng
        left = [other for other in self.members.values() if other.healthy]
        if self.formed and left and rng.random() < 0.4 and not self.ending:
            self._make(self.step + 1, rng.sample(left, rng.randint(1, len(left))))
        for other in left:
            if rng.random() < 0.6:
                self.world.later(rng.uniform(0.05, 2.0), self._echo, other)

    @staticmethod
    def _echo(held: "Held") -> None:
        if held.machine.alive:
            held.machine.end_rank(held, 1, (ECHO,))


class Teams:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.all: dict[int, Team] = {}

    def joined(self, held: "Held", errand: LaunchHere) -> None:
        team = self.all.get(held.generation)
        if team is None:
            team = self.all[held.generation] = Team(self.world, held.generation, errand.world_size)
        team.members[held.rank] = held
        if len(team.members) == team.size:
            self.world.later(_GROUP_S * self.world.rng.uniform(0.5, 2.0), team.meet)

    def ended(self, held: "Held") -> None:
        self.all[held.generation].ended(held)

    def trains(self) -> "list[Team]":
        """Those that could make a step now."""
        return [t for t in self.all.values() if t.formed and not t.broken and not t.ending]
