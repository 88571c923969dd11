"""The simulated ranks of each generation: they meet, restore state, and make steps together while all are healthy."""

import asyncio

from holdfast.model.state_doubt import Doubt
from holdfast.sim.dst.seed_scene import SeedScene
from holdfast.sim.dst.simulated_machine import SimMachine, SimRank
from holdfast.sim.dst.simulated_rank_snapshots import RankState, SimStateError
from holdfast.sim.dst.simulated_state_image import StateTruth
from holdfast.sim.dst.truth_checks import TruthChecks

ECHO = "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.7]:24017"
_GROUP_S = 0.5
_AGAIN_S = 1.0  # ranks wait for one another without end, since torch's timeouts are longer than a seed


class SimStorage:
    """Checkpoints on shared storage; once a generation has published one, older generations can publish none."""

    def __init__(self) -> None:
        self.kept: dict[int, StateTruth] = {}
        self.owner = 0

    def publish_checkpoint(self, generation: int, snap: StateTruth) -> bool:
        if generation < self.owner:
            return False
        self.owner = generation
        self.kept[snap.step] = snap
        return True


class RankTeam:
    """The ranks of one generation."""

    def __init__(self, teams: "RankTeams", generation: int, size: int) -> None:
        self.teams = teams
        self.scene = teams.scene
        self.generation = generation
        self.size = size
        self.members: dict[int, SimRank] = {}
        self._states: dict[int, RankState] = {}  # of those that have begun to take up theirs
        self.step = -1  # the last that all ranks have made
        self.spoilt_at = -1  # the first step of a state that leads to NaN
        self.nan_at = -1  # the step at which the loss shows it
        self.broken = False
        self.ending = False

    @property
    def is_formed(self) -> bool:
        return self.step >= 0

    def meet_ranks(self) -> None:
        """Form process groups and restore state once all ranks have started; retry while some are unhealthy."""
        if self.broken or self.is_formed or len(self.members) < self.size:
            return
        if self._has_ended():
            return
        if not all(held.is_healthy for held in self.members.values()):
            self.scene.call_later(_AGAIN_S, self.meet_ranks)
            return
        self._states = {rank: RankState(held, self.scene.setup.verified) for rank, held in self.members.items()}
        self.scene.run_task(self._restore_ranks(self._states))

    def _has_ended(self) -> bool:
        return any(held.code is not None for held in self.members.values())

    async def _restore_ranks(self, states: dict[int, RankState]) -> None:
        """Have every rank ask its keeper for memory and state, and begin to make steps once all have them."""
        found = await asyncio.gather(*(self._restore_rank(states[rank]) for rank in states))
        while not self._has_ended() and not all(held.is_healthy for held in self.members.values()):  # noqa: ASYNC110
            await asyncio.sleep(_AGAIN_S)  # they wait for one another
        if self.broken or self._has_ended() or states is not self._states:
            return
        memory = any(state.source != "none" for state in states.values())
        picks = dict(zip(states, found, strict=True))
        if not memory:
            newest = self._find_checkpoint(states[min(states)].doubts)
            picks = dict.fromkeys(picks, newest)
        self._begin_steps(picks, memory)

    async def _restore_rank(self, state: RankState) -> StateTruth | None:
        held = state.held
        try:
            return await state.restore()
        except SimStateError as e:
            held.machine.end_rank(held, 1, (f"holdfast.checkpoint.state_image.StateError: {e}",))
            return None

    def _begin_steps(self, picks: dict[int, StateTruth | None], memory: bool) -> None:
        self.teams.truth.on_restore(self.generation, list(self.members.values()), picks, memory)
        snap = next(iter(picks.values()))
        self.step = snap.step if snap else 0
        if snap and snap.nan_at >= 0:
            self.spoilt_at, self.nan_at = snap.step, snap.nan_at
        self.scene.call_later(self.scene.setup.step_s, self.advance_step)

    def _find_checkpoint(self, doubts: tuple[Doubt, ...]) -> StateTruth | None:
        """Return the newest checkpoint that none of these doubts bans; None if there is none."""
        kept = self.teams.storage.kept.values()
        sound = [snap for snap in kept if not any(doubt.bans_state(snap.made, snap.step) for doubt in doubts)]
        return max(sound, key=lambda snap: snap.step, default=None)

    # --- steps -------------------------------------------------------------------------------------------------

    def advance_step(self) -> None:
        if self.broken or self.ending or self.scene.over:
            return
        if all(held.is_healthy for held in self.members.values()):
            last = self.scene.setup.last_step
            if not last or self.step < last:
                self._make_step(self.step + 1, list(self.members.values()))
                self.step += 1
                training = [team.generation for team in self.teams.training_teams()]
                self.teams.truth.on_step(self.generation, self.step, training)
                self._plan_checkpoint()
            if last and self.step >= last:
                self._end_well()
                return
        self.scene.call_later(self.scene.setup.step_s * self.scene.rng.uniform(0.9, 1.1), self.advance_step)

    def _make_step(self, step: int, who: list[SimRank]) -> None:
        for held in who:
            held.make_step(step, held.machine.clock.monotonic(), finite=not 0 <= self.nan_at <= step)
            if held.nan_since < 0:
                self._states[held.rank].take_snapshot(self._describe_state(step))

    def _describe_state(self, step: int) -> StateTruth:
        nan_at = self.nan_at if 0 <= self.spoilt_at <= step else -1
        return StateTruth(step=step, made=self.generation, nan_at=nan_at)

    def _plan_checkpoint(self) -> None:
        every = self.scene.setup.save_steps
        if every and self.step % every == 0 and not 0 <= self.nan_at <= self.step:
            self.scene.call_later(
                self.scene.rng.uniform(0.2, 3.0), self._publish_snapshot, self._describe_state(self.step)
            )

    def _publish_snapshot(self, snap: StateTruth) -> None:
        agents = [held.machine.agent for held in self.members.values()]
        together = all(agent and agent.persisting.author.generation == self.generation for agent in agents)
        if together and self.teams.storage.publish_checkpoint(self.generation, snap):
            first = self.members[0].machine.agent
            assert first is not None
            first.persisting.note_published(snap.step)

    def _end_well(self) -> None:
        self.ending = True
        for held in self.members.values():
            self.scene.call_later(self.scene.rng.uniform(0.0, 1.0), held.machine.end_rank, held, 0)

    def on_rank_end(self, held: SimRank) -> None:
        """React to a rank's end. Some of the other ranks may still make a step, and some fail because of this end."""
        if self.broken or (self.ending and held.code == 0):
            return
        self.broken = True
        rng = self.scene.rng
        left = [other for other in self.members.values() if other.is_healthy]
        if self.is_formed and left and rng.random() < 0.4 and not self.ending:
            self._make_step(self.step + 1, rng.sample(left, rng.randint(1, len(left))))
        setup = self.scene.setup
        waits_s = setup.settings.recovery.survive_s if setup.survives else 0.0  # first to be told what to do
        for other in left:
            if rng.random() < 0.6:
                self.scene.call_later(waits_s + rng.uniform(0.05, 2.0), self._end_as_echo, other)

    def on_rank_restart(self) -> None:
        """React to a rank that was started again because its machine lost power during the launch. If the ranks have
        already formed their process group with the old rank, they fail."""
        if not self.is_formed:
            self.broken = any(held.code is not None for held in self.members.values())
            return
        for held in self.members.values():
            self.scene.call_later(self.scene.rng.uniform(0.05, 2.0), self._end_as_echo, held)

    @staticmethod
    def _end_as_echo(held: SimRank) -> None:
        if held.machine.alive and not held.parked:
            held.machine.end_rank(held, 1, (ECHO,))


class RankTeams:
    def __init__(
        self, scene: SeedScene, truth: TruthChecks, machines: dict[str, SimMachine], storage: SimStorage
    ) -> None:
        self.scene = scene
        self.truth = truth
        self.machines = machines
        self.storage = storage
        self.all: dict[int, RankTeam] = {}

    def on_rank_start(self, held: SimRank) -> None:
        self.truth.on_rank_start(held)
        team = self.all.get(held.generation)
        if team is None:
            team = self.all[held.generation] = RankTeam(self, held.generation, held.world)
        again, team.members[held.rank] = held.rank in team.members, held
        if again:
            team.on_rank_restart()
        if len(team.members) == team.size:
            self.scene.call_later(_GROUP_S * self.scene.rng.uniform(0.5, 2.0), team.meet_ranks)

    def on_rank_end(self, held: SimRank) -> None:
        self.all[held.generation].on_rank_end(held)

    def training_teams(self) -> list[RankTeam]:
        """Return the teams of the generations that could make a step now."""
        return [t for t in self.all.values() if t.is_formed and not t.broken and not t.ending]
