"""What must never happen, seen from outside: the checks know what no part of the system knows."""

from typing import TYPE_CHECKING

from holdfast.core.account import fold
from holdfast.core.decider import Decider
from holdfast.core.node import NodeLife
from holdfast.model.action import Finish, Say
from holdfast.model.alarm import Alarm, Kind, Stance
from holdfast.model.event import Ended, Entry, Progress
from holdfast.sim.checks import Effort, Unsafe, Watch
from holdfast.sim.dst.disk import Disk
from holdfast.sim.dst.keeper import Snap

if TYPE_CHECKING:
    from holdfast.sim.dst.machine import Held, Machine
    from holdfast.sim.dst.teams import Team
    from holdfast.sim.dst.world import World

_TOLD_S = 6.0  # times that agents tell may be off by what a message takes, and by their clocks' drift


class Truth:
    def __init__(self, world: "World", disk: Disk) -> None:
        self.world = world
        self.disk = disk
        self.effort = Effort()
        self.steps = 0
        self.finish = ""  # why the job ended
        self._watch = Watch()
        self._seen = 0  # entries that the watch has looked at
        self._kept: set[Alarm | Ended] = set()  # events on disk
        self._asked: set[int] = set()  # actions on disk
        self._read = 0  # entries that these were learned from
        self._from: dict[int, tuple[int, int]] = {}  # generation -> step and maker of the state that it took up
        self._complete: dict[int, int] = {}  # generation -> the last step that all of its ranks have made
        self._begun_at: dict[int, float] = {}
        self._told = 0  # the newest generation of which the journal knows a step
        self._doubts: list[tuple[int, int]] = []  # by alarms: generation, last good step

    def broken(self, what: str) -> None:
        self.world.fail(what)

    # --- the journal -------------------------------------------------------------------------------------------

    def entry(self, entry: Entry, decider: Decider) -> None:
        try:
            self._watch.look(entry, decider)
            self.effort.look(entry)
        except Unsafe as e:
            self.broken(str(e))
        self._seen = entry.seq
        self._remember(entry)

    def _remember(self, entry: Entry) -> None:
        for action in entry.decision.actions:
            if isinstance(action, Finish):
                self.finish = action.reason
        match entry.event:
            case Progress(generation=generation, at=at, first_at=first_at):
                self._told = max(self._told, generation)
                for told in (at, first_at):
                    self._is_timely(entry, told, generation)
            case Alarm(kind=Kind.CRASH, generation=generation, at=at) if generation:
                self._is_timely(entry, at, generation)
            case Alarm(not_after=int() as not_after, stance=Stance.ACT, generation=generation):
                self._doubts.append((generation, not_after))

    def _is_timely(self, entry: Entry, at: float, generation: int) -> None:
        begun_at = self._begun_at.get(generation)
        early = begun_at is not None and at < begun_at - _TOLD_S
        if early or at > entry.at + _TOLD_S:
            self.broken(
                f"entry {entry.seq}: {type(entry.event).__name__} is dated {at - entry.at:+.1f} s from its entry"
            )

    def restarts(self) -> None:
        """A controller comes back: it has never heard what it had not put on disk."""
        if self._seen != len(self.disk.entries):
            self._watch, self.effort, decider = Watch(), Effort(), Decider()
            self._told, self._doubts, self._read = 0, [], min(self._read, len(self.disk.entries))
            for entry in self.disk.entries:
                decider.step(entry.at, entry.event)
                self.entry(entry, decider)

    def acked(self, life: NodeLife, seq: int) -> None:
        """What an agent need not say again is on the controller's disk."""
        post = life._outbox.get(seq)
        self._read_on()
        body = post.body if post else None
        acted = isinstance(body, Ended) or (isinstance(body, Alarm) and body.stance is Stance.ACT)
        if acted and body not in self._kept:
            self.broken(f"{life.node}'s {type(body).__name__} was acknowledged and is not on disk: {body}")

    def carries(self, id: int) -> None:
        """What a node is about to do, the controller will know of if it dies now."""
        self._read_on()
        if 0 < id and id not in self._asked:
            self.broken(f"action {id} is carried out, and is not on disk")

    def stays(self, node: str) -> None:
        """Whoever has begun to leave has ended ranks, and nobody was told: it must not stay as if nothing were."""
        self.broken(f"{node} has begun to leave, and its next agent stays")

    def fenced(self, machine: "Machine", for_s: float) -> None:
        """Where nobody can be asked, all that a launch waits for is that a node without a controller ends its ranks."""
        left = [held for held in machine.running() if not held.unkillable]
        if left and machine.buried:
            self.broken(
                f"generation {left[0].generation} lives on {machine.name}, which had no controller for {for_s:g} s"
            )

    def _read_on(self) -> None:
        """Learn what has come to the disk since."""
        for entry in self.disk.entries[self._read :]:
            self._asked.update(action.id for action in entry.decision.actions if not isinstance(action, Say))
            if isinstance(entry.event, Alarm | Ended):
                self._kept.add(entry.event)
        self._read = len(self.disk.entries)

    def tiles(self) -> None:
        """Spans cover the life of the job without gap or overlap."""
        try:
            fold(self.disk.entries)
        except AssertionError as e:
            self.broken(str(e))

    def replays(self) -> None:
        """The journal, read again, gives the same decisions."""
        decider = Decider()
        for entry in self.disk.entries:
            if decider.step(entry.at, entry.event) != entry.decision:
                self.broken(f"entry {entry.seq} decides otherwise when it is replayed")
                return

    # --- ranks -------------------------------------------------------------------------------------------------

    def starts(self, held: "Held", running: "list[Held]") -> None:
        self._begun_at.setdefault(held.generation, self.world.now())
        others = sorted({other.generation for other in running} - {held.generation})
        if others:
            self.broken(f"generation {others[0]} lives on {held.machine.name} when {held.generation} starts there")

    def restored(self, team: "Team", picks: dict[int, Snap | None], memory: bool) -> None:
        """The states that a generation takes up."""
        releases = sorted({held.release for held in team.members.values()})
        if len(releases) > 1:
            self.broken(f"generation {team.generation} runs releases {releases} at once")
        found = {(snap.step, snap.made) if snap else (0, 0) for snap in picks.values()}
        self.world.note(
            f"generation {team.generation} goes on from {sorted(found)}, {'memory' if memory else 'storage'}"
        )
        if len(found) > 1:
            self.broken(f"generation {team.generation} mixes states: (step, made by) {sorted(found)}")
            return
        ((step, made),) = found
        self._from[team.generation], self._complete[team.generation] = (step, made), step
        if made and step > self._complete[made]:
            self.broken(f"generation {team.generation} goes on from step {step}, which {made} never completed")
        for generation, not_after in self._doubts:
            if 0 < made <= generation and step > not_after:
                self.broken(
                    f"generation {team.generation} goes on from step {step} of {made}, in doubt after {not_after}"
                )
        told = self._newest() if self.world.setup.forgets else self._told
        if memory and told and made != (line := self._maker(step, told)):
            self.broken(
                f"generation {team.generation} goes on from step {step} of {made}, a line that was left: "
                f"that of {told} has the step from {line}"
            )

    def _newest(self) -> int:
        """The newest generation that has made a step, whether or not the journal still knows of it."""
        return max((g for g, step in self._complete.items() if step > self._from[g][0]), default=0)

    def _maker(self, step: int, generation: int) -> int:
        """Who made this step on the line that leads to this generation."""
        while generation and step <= self._from[generation][0]:
            generation = self._from[generation][1]
        return generation

    def stepped(self, team: "Team") -> None:
        self.steps += 1
        self._complete[team.generation] = team.step
        newer = [other.generation for other in self.world.teams.trains() if other.generation > team.generation]
        if newer:
            self.broken(f"generation {team.generation} makes step {team.step} while {newer[0]} trains")
