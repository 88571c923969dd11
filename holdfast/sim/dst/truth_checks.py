"""Safety checks from outside of the system; they use facts of the simulated world that no part of the system knows."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from holdfast.core.agent_state_machine import AgentProtocol
from holdfast.core.decide.decider import Decider
from holdfast.core.decide.job_view import JobView
from holdfast.core.record.ledger import fold_entries
from holdfast.decoding import from_json
from holdfast.model.action import Finish, Launch, Say
from holdfast.model.decider_events import Ended, Progress, Ready, Tick
from holdfast.model.detector_alarm import SWITCH, Alarm, Kind, Stance
from holdfast.model.job_and_seats import world_size
from holdfast.model.journal_entry import Entry
from holdfast.model.restore_sources import Restore
from holdfast.sim.dst.controller_disk import SimDisk
from holdfast.sim.dst.seed_scene import SeedScene
from holdfast.sim.dst.simulated_machine import KeptState, SimMachine, SimRank
from holdfast.sim.dst.simulated_state_image import StateTruth, read_truths
from holdfast.sim.invariants import InvariantWatch, RecoveryEffort, UnsafeError

_TOLD_S = 6.0  # times that agents tell may be off by what a message takes, and by their clocks' drift


class TruthChecks:
    def __init__(
        self, scene: SeedScene, disk: SimDisk, machines: dict[str, SimMachine], stored: Mapping[int, StateTruth]
    ) -> None:
        self.scene = scene
        self.disk = disk
        self._machines = machines
        self._stored = stored  # checkpoints, by step
        self.effort = RecoveryEffort()
        self.steps = 0
        self.finish = ""  # why the job ended
        self._watch = InvariantWatch()
        self._seen = 0  # entries that the watch has looked at
        self._kept: set[Alarm | Ended] = set()  # events on disk
        self._asked: set[int] = set()  # actions on disk
        self._read = 0  # entries that these were learned from
        self._from: dict[int, tuple[int, int]] = {}  # generation -> step and maker of the state that it took up
        self._complete: dict[int, int] = {}  # generation -> the last step that all of its ranks have made
        self._begun_at: dict[int, float] = {}
        self._told = 0  # the newest generation of which the journal knows a step, or has known one that it has lost
        self._doubts: list[tuple[int, int]] = []  # by alarms: generation, last good step
        self._life_at, self._life_plan = 0.0, 0  # since when this controller runs, and the newest launch planned before
        self._launched: set[int] = set()  # generations of which a node was told

    def report_broken(self, what: str) -> None:
        self.scene.report_failure(what)

    # --- the journal -------------------------------------------------------------------------------------------

    def on_entry(self, entry: Entry, view: JobView) -> None:
        self._watch_entry(entry, view)
        self._check_giving_up(entry, view)

    def _watch_entry(self, entry: Entry, view: JobView) -> None:
        try:
            self._watch.check_entry(entry, view)
            self.effort.on_entry(entry)
        except UnsafeError as e:
            self.report_broken(str(e))
        self._seen = entry.seq
        self._remember_entry(entry)

    def _remember_entry(self, entry: Entry) -> None:
        for action in entry.decision.actions:
            if isinstance(action, Finish):
                self.finish = action.reason
        match entry.event:
            case Progress(generation=generation, at=at, first_at=first_at):
                self._told = max(self._told, generation)
                for told in (at, first_at):
                    self._check_date(entry, told, generation)
            case Alarm(kind=Kind.CRASH, generation=generation, at=at) if generation:
                self._check_date(entry, at, generation)
            case Alarm(not_after=int() as not_after, stance=Stance.ACT, generation=generation):
                self._doubts.append((generation, not_after))

    def _check_giving_up(self, entry: Entry, view: JobView) -> None:
        """Check that a job that gives up for lack of nodes does not leave any available node unused."""
        ends = any(isinstance(action, Finish) for action in entry.decision.actions)
        if ends and isinstance(entry.event, Tick) and (idle := self.idle_nodes(view)):
            self.report_broken(f"the job gives up, {self.finish}, and makes no use of {', '.join(idle)}")

    def idle_nodes(self, view: JobView) -> list[str]:
        """Return the nodes that have a link and may join, but are neither seated nor standbys nor under probe."""
        used = {*view.active, *view.pool, *view.coming, *view.under_probe}
        linked = [name for name, machine in self._machines.items() if machine.agent and machine.agent.link]
        return [name for name in linked if name not in used and view.gone.get(name, Kind.SILENCE) is Kind.SILENCE]

    def _check_date(self, entry: Entry, at: float, generation: int) -> None:
        begun_at = self._begun_at.get(generation)
        early = begun_at is not None and at < begun_at - _TOLD_S
        if early or at > entry.at + _TOLD_S:
            self.report_broken(
                f"entry {entry.seq}: {type(entry.event).__name__} is dated {at - entry.at:+.1f} s from its entry"
            )

    def on_restart(self) -> None:
        """If a restarted controller finds journal entries lost, learn anew from the entries that are left."""
        self._life_at, self._life_plan = self.scene.now(), self._planned_generation()
        if self._seen != len(self.disk.entries):
            self._watch, self.effort, decider = InvariantWatch(), RecoveryEffort(), Decider()
            self._doubts, self._read = [], min(self._read, len(self.disk.entries))
            for entry in self.disk.entries:
                decider.step(entry.at, entry.event)
                self._watch_entry(entry, decider.view)

    def on_ack(self, life: AgentProtocol, seq: int) -> None:
        """Check a report that the controller has acknowledged. If it is a rank's end or an alarm with the stance to
        act, it must be in the journal on disk, or an alarm about a switch must cover it."""
        post = life._outbox.get(seq)
        self._read_new_entries()
        body = post.body if post else None
        acted = isinstance(body, Ended) or (isinstance(body, Alarm) and body.stance is Stance.ACT)
        if acted and body not in self._kept and not self._is_told_of_a_switch(body):
            self.report_broken(f"{life.node}'s {type(body).__name__} was acknowledged and is not on disk: {body}")

    def _is_told_of_a_switch(self, body: object) -> bool:
        """Return whether `body` is an alarm whose suspects are all in an alarm about a switch in the journal."""
        switches = (kept for kept in self._kept if isinstance(kept, Alarm) and kept.signature == SWITCH)
        return isinstance(body, Alarm) and any(set(body.suspects) <= set(kept.suspects) for kept in switches)

    def on_errand(self, id: int) -> None:
        """Check that the action behind an errand is in the journal on disk before a node gets the errand."""
        self._read_new_entries()
        if 0 < id and id not in self._asked:
            self.report_broken(f"a node is told action {id}, which is not on disk")

    def on_launch(self, generation: int, restore: Restore) -> None:
        """Check, when the first node is told of a launch, that a controller that has just taken over has heard the
        nodes before it planned. Within the time after which a node counts as silent, all that can be reached have to be
        heard, so the launch may not give up a step that each of them holds for its own ranks."""
        first = generation not in self._launched
        self._launched.add(generation)
        soon = self.scene.now() < self._life_at + self.scene.setup.settings.silence.silence_s
        if first and soon and generation > self._life_plan and not self.scene.setup.forgets:
            step, known = self._step_of_all(generation), max(restore.step if restore.is_held else -1, restore.stored)
            if step > known:
                self.report_broken(f"generation {generation} gives up step {step}, which all of its nodes hold")

    def _planned_generation(self) -> int:
        note = self.disk.notes.get("plan.json")
        return int(from_json(note, dict[str, Any])["generation"]) if note else 0

    def _step_of_all(self, generation: int) -> int:
        """Return the newest sound step of the job's lineage that each node of a launch holds in memory for its own
        ranks; -1 if there is none, if a node cannot be reached, or if the launch may have reasons not to take it."""
        launch, back = self._find_launch(generation)
        if launch is None or launch.not_after is not None or launch.resizes or launch.astray or self._doubts:
            return -1
        if any(seat.node in back for seat in launch.seats):
            return -1  # what an evicted node holds does not count, even if it is back
        world, newest = world_size(launch.seats), self._newest_generation()
        held: list[set[int]] = []
        for seat in launch.seats:
            machine = self._machines[seat.node]
            if not machine.is_connected or machine.cut or machine.agent is None:
                return -1
            pages = Counter((rank, snap) for rank, _, snap in machine.memory.list_states() if snap.nan_at < 0)
            whole = [one for one, count in pages.items() if count == world + 1]  # as in make_layout
            line = [(rank, snap) for rank, snap in whole if snap.made == self._step_maker(snap.step, newest)]
            held += [{snap.step for rank, snap in line if rank == own} for own in seat.ranks]
        return max(set.intersection(*held), default=-1)

    def _find_launch(self, generation: int) -> tuple[Launch | None, set[str]]:
        """Return the launch of a generation, and the nodes that became ready between the launch before and it."""
        found, back = None, set[str]()
        for entry in reversed(self.disk.entries):
            for action in entry.decision.actions:
                if isinstance(action, Launch) and action.generation != generation:
                    return found, back
                found = action if isinstance(action, Launch) else found
            if isinstance(entry.event, Ready):
                back.add(entry.event.node)
        return found, back

    def on_stay(self, node: str) -> None:
        """Report a failure: a node had begun to leave and ended its ranks, but its restarted agent does not leave."""
        self.report_broken(f"{node} has begun to leave, and its next agent stays")

    def check_fence(self, machine: SimMachine, for_s: float) -> None:
        """Check a node that was cut off, with a full disk, for longer than a fence lasts. The node must have ended its
        ranks, because a launch no longer waits for them."""
        left = [held for held in machine.running_ranks() if not held.unkillable]
        if left and machine.buried:
            self.report_broken(
                f"generation {left[0].generation} lives on {machine.name}, which had no controller for {for_s:g} s"
            )

    def _read_new_entries(self) -> None:
        """Note the actions, alarms and ended ranks in entries written since the last call."""
        for entry in self.disk.entries[self._read :]:
            self._asked.update(action.id for action in entry.decision.actions if not isinstance(action, Say))
            if isinstance(entry.event, Alarm | Ended):
                self._kept.add(entry.event)
        self._read = len(self.disk.entries)

    def check_spans(self) -> None:
        """Check that the journal's spans cover the whole run without gap or overlap."""
        try:
            fold_entries(self.disk.entries)
        except AssertionError as e:
            self.report_broken(str(e))

    def check_rebuild(self) -> None:
        """Check that a decider rebuilt from the journal makes the same decisions."""
        decider = Decider()
        for entry in self.disk.entries:
            if decider.step(entry.at, entry.event) != entry.decision:
                self.report_broken(f"entry {entry.seq} decides otherwise when it is replayed")
                return

    # --- ranks -------------------------------------------------------------------------------------------------

    def on_rank_start(self, held: SimRank) -> None:
        self._begun_at.setdefault(held.generation, self.scene.now())
        running = [other for other in held.machine.running_ranks() if not other.parked]
        others = sorted({other.generation for other in running} - {held.generation})
        if others:
            self.report_broken(
                f"generation {others[0]} lives on {held.machine.name} when {held.generation} starts there"
            )

    def on_restore(
        self, generation: int, members: list[SimRank], picks: dict[int, StateTruth | None], memory: bool
    ) -> None:
        """Check the states that a generation resumes from. All must be of one step, made by one generation that
        completed the step. They must not be in doubt, and must belong to the job's history."""
        releases = sorted({held.release for held in members})
        if len(releases) > 1:
            self.report_broken(f"generation {generation} runs releases {releases} at once")
        found = {(snap.step, snap.made) if snap else (0, 0) for snap in picks.values()}
        self.scene.log_line(
            f"generation {generation} goes on from {sorted(found)}, {'memory' if memory else 'storage'}"
        )
        if len(found) > 1:
            self.report_broken(f"generation {generation} mixes states: (step, made by) {sorted(found)}")
            return
        ((step, made),) = found
        self._from[generation], self._complete[generation] = (step, made), step
        if made and step > self._complete[made]:
            self.report_broken(f"generation {generation} goes on from step {step}, which {made} never completed")
        for doubted, not_after in self._doubts:
            if 0 < made <= doubted and step > not_after:
                self.report_broken(
                    f"generation {generation} goes on from step {step} of {made}, in doubt after {not_after}"
                )
        self._check_lineage(generation, step, made, memory)
        self._check_held(generation, {held.machine.name for held in members})

    def _check_lineage(self, generation: int, step: int, made: int, memory: bool) -> None:
        """Check the step from memory that a generation resumes from. The generation that made it must be in the job's
        history: in the line of restores of the newest generation, or of the newest one in the journal."""
        newest, told = self._newest_generation(), self._told
        if memory and told and made not in {self._step_maker(step, told), self._step_maker(step, newest)}:
            self.report_broken(
                f"generation {generation} goes on from step {step} of {made}, a line that was left: "
                f"that of {told} has the step from {self._step_maker(step, told)}"
            )

    def _check_held(self, generation: int, nodes: set[str]) -> None:
        """Check that a generation's nodes hold only states of its lineage, since a later launch may restore any of
        them."""
        for node in sorted(nodes):
            for rank, sealed, snap in self._machines[node].memory.list_states():
                if sealed.step != snap.step:
                    self.report_broken(f"{node} holds step {snap.step} of rank {rank} as step {sealed.step}")
                if snap.made != (line := self._step_maker(snap.step, generation)):
                    self.report_broken(
                        f"{node} holds step {snap.step} of rank {rank} from {snap.made}, a line that was left: "
                        f"that of {generation} has the step from {line}"
                    )

    def _newest_generation(self) -> int:
        """Return the newest generation that made a step, even if its journal entries were lost; 0 if none did."""
        return max((g for g, step in self._complete.items() if step > self._from[g][0]), default=0)

    def _step_maker(self, step: int, generation: int) -> int:
        """Return the generation that made this step: `generation` or one that it descends from; 0 if none did."""
        while generation and step <= self._from[generation][0]:
            generation = self._from[generation][1]
        return generation

    # --- states on disks ---------------------------------------------------------------------------------------

    def on_disk_removal(self, machine: SimMachine, kept: list[KeptState]) -> None:
        """Remove all states but `kept` from a machine's disk. Report a failure if this loses the newest step that the
        disks held for every rank, and storage has no step as new."""
        before, stored = self._newest_on_disks(), max(self._stored, default=-1)
        machine.states = kept
        if self._newest_on_disks() < before and stored < before:
            self.report_broken(f"{machine.name} removes step {before} from its disk, and storage has step {stored}")

    def on_disk_eviction(self, machine: SimMachine, generation: int) -> None:
        """Remove all states of an evicted machine. Report a failure if the machine held states and no generation newer
        than `generation` has made a step."""
        if machine.states and self._newest_generation() <= generation:
            self.report_broken(f"{machine.name} removes its states, and nobody has made a step since")
        machine.states = []

    def _newest_on_disks(self) -> int:
        """Return the newest step for which disks hold every rank's state from one generation; -1 if there is none."""
        held: dict[tuple[int, int, int], set[int]] = {}
        for machine in self._machines.values():
            for state, image in machine.states:
                plan, snap = state.note.layout, next(read_truths(image))
                held.setdefault((snap.step, snap.made, plan.world), set()).add(plan.rank)
        return max((step for (step, _, world), ranks in held.items() if len(ranks) == world), default=-1)

    def on_step(self, generation: int, step: int, training: list[int]) -> None:
        """Check, when a generation makes a step, that no newer generation could make a step at the same moment."""
        self.steps += 1
        self._complete[generation] = step
        newer = [other for other in training if other > generation]
        if newer:
            self.report_broken(f"generation {generation} makes step {step} while {newer[0]} trains")
