"""The controller's loop: each event steps the decider and is journaled before any action is carried out."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable

import msgspec

from holdfast.config import Settings
from holdfast.controller.actions.action_executor import ActionExecutor
from holdfast.controller.actions.errand_dispatch import ErrandDispatch
from holdfast.controller.decider_rebuild import rebuild_decider
from holdfast.controller.fleet_watch import FleetWatch
from holdfast.controller.full_disk_note import read_full_disk
from holdfast.controller.job_clock import JobClock
from holdfast.controller.job_progress_watch import StallWatch
from holdfast.controller.network_watch import NetworkWatch
from holdfast.controller.node_links import NodeLinks
from holdfast.controller.node_registry import NodeRegistry
from holdfast.controller.peer_copies_and_aims import SnapshotAims
from holdfast.controller_interfaces import ControllerPorts
from holdfast.core.agent_state_machine import fence_s
from holdfast.core.decide.decider import Decider
from holdfast.core.decide.fleet_news import OUT_OF_TIME
from holdfast.core.detect.job_progress import JobPace
from holdfast.core.detect.replica import ReplicaDetector
from holdfast.core.detect.silence import departure_alarm
from holdfast.core.record.ledger import Ledger
from holdfast.core.record.release_history import ReleaseHistory
from holdfast.model.action import Action, Launch, Say, Stop
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Begin, Ended, Event, Lost, MeshReport, Order, Outcome, Successor, Tick
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from holdfast.wire.agent_messages import Hello
from holdfast.wire.run_and_node_specs import FULL_DISK

TICK_S = 0.25
LINK_LOST_S = 0.5  # between surveys while a node has no link and is not silent for long enough to count as lost
MEET_S = 30.0  # ranks that have met before the store went away make their first step; others never do
_log = logging.getLogger("holdfast.controller")


class JobDetectors(msgspec.Struct, frozen=True, kw_only=True):
    """The detectors that watch the running generation as a whole."""

    pace: JobPace
    replicas: ReplicaDetector
    stalls: StallWatch
    network: NetworkWatch

    def on_launch(self, now: float, launch: Launch) -> None:
        self.replicas.on_launch(launch.generation)
        self.stalls.on_launch(now, launch)
        self.network.on_launch(now, launch)
        self.pace.on_launch(launch.generation, tuple(seat.node for seat in launch.seats))


class Controller:
    def __init__(
        self,
        settings: Settings,
        ports: ControllerPorts,
        *,
        clock: JobClock,
        decider: Decider,
        ledger: Ledger,
        links: NodeLinks,
        registry: NodeRegistry,
        aims: SnapshotAims,
        detectors: JobDetectors,
        dispatch: ErrandDispatch,
        executor: ActionExecutor,
        fleet_watch: FleetWatch,
    ) -> None:
        self.settings = settings
        self.journal, self.fleet = ports.journal, ports.fleet
        self.archives, self.checkpoint_table = ports.archives, ports.checkpoints
        self.clock, self._decider, self.ledger = clock, decider, ledger
        self.view = decider.view
        self.links, self.registry, self.aims = links, registry, aims
        self.detectors, self.dispatch, self.executor = detectors, dispatch, executor
        self.fleet_watch = fleet_watch
        self.history = ReleaseHistory()
        self.last = Decision()
        self.reason = ""  # the newest that says something
        self.seq = 0
        self.lag_s = 0.0  # of the event loop, newest
        self._say, self._on_entry, self._on_replayed = ports.say, ports.on_entry, ports.on_replayed
        self._tasks: asyncio.TaskGroup
        self._acts: set[asyncio.Task[None]] = set()
        self._done = asyncio.Event()
        self._survey_due = False  # a node has heard that its end is near
        self._stepping = False
        self.began_job = False  # the journal was empty, as at a new job, or after all of it was lost
        self.is_over = False  # the job has ended, and the journal is closed

    @property
    def epoch(self) -> int:
        """The number of this controller in its run; the first one is 1. Asking for it raises LeaseLostError if another
        controller may act by now, as after a pause."""
        return self.journal.epoch

    async def run(
        self,
        job: Job,
        release: Release,
        on_begun: Callable[[], None] | None = None,
        started_at: float = 0.0,
        *,
        resumed_at: float = 0.0,
    ) -> int:
        """Drive the job to its end and return its exit code. A new job begins with `release` at `started_at`.
        `on_begun` is called once people can give orders. `resumed_at` is when the run was last resumed, 0 if never. A
        job that had already ended goes on only if it ended because its nodes ran out of time."""
        unanswered = self._rebuild_decider()
        known = {*(s.node for s in self.view.seats), *self.view.pool, *self.view.under_probe}
        self.registry.expect_nodes(self.clock(), known - set(self.view.gone), self.journal.alive_at)
        async with asyncio.TaskGroup() as self._tasks:
            self.began_job = self.seq == 0
            if self.began_job:
                fence, limits = fence_s(self.settings.node), self.settings.recovery
                begin = Begin(job=job, limits=limits, release=release, fence_s=fence, started_at=started_at)
                self.process_event(begin)
            self._take_over()
            if self._go_on(resumed_at):
                unanswered = {}
            self._hear_departures()
            for action in self._unfinished_actions(unanswered):
                self._spawn_task(self._carry_out(action))
            self._spawn_task(self._tick_forever())
            if self.fleet.survey_s:
                self._spawn_task(self._survey_forever())
            if self.view.phase is Phase.DONE:
                self._done.set()  # an earlier controller got this far
            if on_begun:
                on_begun()
            await self._done.wait()
            for task in self._acts:
                task.cancel()  # a launch may still wait for nodes that are gone
        self.is_over = True
        self.journal.close()
        return self.ledger.make_account().code or 0 if self.ledger.finish else 1

    def _take_over(self) -> None:
        """Tell the decider that this controller has taken over. If the journal has lost a launch, also tell which nodes
        may still run it."""
        if self.journal.doubt:
            self._say(self.journal.doubt)
        plan, lost = self.executor.newest_plan(), self.journal.lost
        if lost is None and plan and plan.generation > self.view.generation:
            lost = Lost(kept=self.seq, of=0)
        if lost and plan:  # written before any node is told of a launch, and so the newest that may run
            newest = max(lost.generation, plan.generation)
            lost = msgspec.structs.replace(lost, generation=newest, nodes=plan.nodes)
        if self.view.phase is not Phase.DONE and (self.epoch > 1 or lost):
            self._announce_takeover(lost)

    def _go_on(self, resumed_at: float) -> bool:
        """Continue a job that ended only because its nodes ran out of time. Return False if it ended for another
        reason."""
        over_at = self.ledger.make_account().end_at
        if not (self.view.phase is Phase.DONE and self.view.exit_code == OUT_OF_TIME and resumed_at > over_at):
            return False
        self._announce_takeover(None)
        self.process_event(Order(verb="resume", who="holdfast run --resume"))
        self._done.clear()  # as it was over when it heard of us
        return True

    def _announce_takeover(self, lost: Lost | None) -> None:
        if lost and lost.generation > self.view.generation:
            self.registry.record_orphaned(lost.generation)
        alive_at = self.journal.alive_at
        full = read_full_disk(self.executor.notes.get_note(FULL_DISK), alive_at)
        taken_over = Successor(epoch=self.epoch, lost=lost, alone_since=alive_at, full_disk=full.path)
        self.process_event(msgspec.structs.replace(taken_over, full_until=full.until))

    def _hear_departures(self) -> None:
        """Process what nodes of this generation last reported when they left while no controller ran."""
        if self.view.phase not in (Phase.LAUNCHING, Phase.STARTING, Phase.TRAINING):
            return
        generation, active = self.view.generation, self.view.active
        gone = [one for one in self.fleet.departures() if one.generation == generation and one.node in active]
        for one in gone:
            if one.beat and (progress := self.detectors.pace.on_beat(self.clock(), one.beat)):
                self.executor.on_step(progress)
                self.process_event(progress)
        for one in gone:
            if one.beat:
                self.registry.record_stored(self.clock(), one.beat)
            self.registry.record_departure(one.node)
            ended = Ended(node=one.node, generation=generation, departed=True)
            self.announce_news(ended if one.ended else departure_alarm(one))

    def on_newer_node(self, hello: Hello, nodes: Iterable[str]) -> None:
        """Announce a loss of journal entries, which shows when a node's hello has a newer epoch or generation than the
        journal. `nodes` are the nodes on which that generation may run; an empty `nodes` means that nobody knows."""
        if hello.epoch >= self.epoch:
            self.journal.raise_epoch(hello.epoch + 1)
        lost = Lost(kept=self.seq, of=0, generation=hello.generation, nodes=tuple(sorted(nodes)))
        self._announce_takeover(lost)

    @property
    def reached_step(self) -> int:
        """The newest step that every rank has made, as status, metrics and the report show it."""
        pace = self.detectors.pace
        step = pace.step if pace.generation == self.view.generation else -1
        return step if step >= 0 else self.ledger.step

    def describe_present(self) -> str:
        """Return one line on what the job is doing now; it names ranks that have reported no step."""
        pace, finish = self.detectors.pace, self.ledger.finish
        mute = pace.find_mute(self.view.seats) if pace.generation == self.view.generation else ()
        return self.view.describe_present(self.clock(), self.reached_step, finish.reason if finish else "", mute)

    def announce_news(self, news: Alarm | Ended | Outcome) -> None:
        """Process an alarm, an Ended or an Outcome, after pending progress, so that the newest step is known."""
        if isinstance(news, Alarm) and news.kind is Kind.SILENCE:
            self.detectors.pace.on_silence(news.suspects)
        self._flush_progress()
        self.process_event(news)

    def _flush_progress(self) -> None:
        if progress := self.detectors.pace.flush_progress(self.clock()):
            self.process_event(progress)

    def process_event(self, event: Event) -> None:
        """Process one event: step the decider, journal the decision, start its actions. Every event comes here."""
        if self.is_over:
            return  # people and nodes may still call while hooks hear of the end
        # A step that failed has changed the decider and is not in the journal: only the next controller knows what is.
        assert not self._stepping, "a step failed; see above"
        _ = self.epoch  # before the state changes
        self._stepping = True
        now = self.clock()
        decision = self._decider.step(now, event)
        self.seq += 1
        entry = Entry(seq=self.seq, at=now, event=event, decision=decision)
        # A person was told that the order is taken, so it is, whatever becomes of this controller.
        self.journal.append(entry, durable=bool(decision.actions) or isinstance(event, Order))
        self.ledger.add(entry)
        self.history.add(entry)
        self._on_entry(entry, self.view)
        if decision.reason and decision.reason != self.reason:
            self.reason = decision.reason
            _log.info("%s", decision.reason)
        self.last = decision
        self._prepare_copies(event)
        for action in decision.actions:
            self._prepare_launch(action)
            self._spawn_task(self._carry_out(action))
        if decision.phase is Phase.DONE:
            self._done.set()
        self._stepping = False

    async def _carry_out(self, action: Action) -> None:
        if outcome := await self.executor.carry_out(action):
            self.announce_news(outcome)

    def end_at_once(self) -> None:
        """End all nodes without grace, because a stop was ordered twice; do nothing if the job is over."""
        if not self._done.is_set():
            counted = self.ledger.make_account().since  # such a number says nothing about checkpoints
            self._spawn_task(self.executor.end_at_once(-1 if counted else self.reached_step))

    def on_store_lost(self) -> None:
        """If ranks are starting, raise an alarm unless they make a step soon. They may wait for the lost store."""
        if self.view.phase in (Phase.LAUNCHING, Phase.STARTING):
            self._spawn_task(self._check_starting(self.view.generation))

    async def _check_starting(self, generation: int) -> None:
        await asyncio.sleep(MEET_S)
        self._flush_progress()
        if self.view.generation == generation and self.view.phase in (Phase.LAUNCHING, Phase.STARTING):
            reason = "the store process ended while ranks were starting, and they have made no step since"
            now = self.clock()
            alarm = Alarm(kind=Kind.CRASH, at=now, suspects=(), reason=reason, generation=generation, signature="store")
            self.process_event(alarm)

    def _spawn_task(self, deed: Coroutine[None, None, None]) -> None:
        task = self._tasks.create_task(deed)
        self._acts.add(task)
        task.add_done_callback(self._acts.discard)

    def _prepare_launch(self, action: Action) -> None:
        """Before a launch, reset the detectors and choose the nodes that keep copies of snapshots."""
        if isinstance(action, Launch):
            self.detectors.on_launch(self.clock(), action)
            self.aims.place_copies(action.generation, action.seats, self.view.mesh)

    def _prepare_copies(self, event: Event) -> None:
        """After a report of the script's parallel groups, choose again which nodes keep copies of snapshots."""
        if isinstance(event, MeshReport):
            self.aims.place_copies(self.view.generation, self.view.seats, self.view.mesh)

    def _rebuild_decider(self) -> dict[int, Action]:
        """Rebuild the decider from the journal; return the actions that have no outcome, by id."""
        unanswered: dict[int, Action] = {}
        at = 0.0
        for entry in rebuild_decider(self.journal, self._decider):
            decision = entry.decision
            self.seq, at, self.last = entry.seq, entry.at, decision
            self.ledger.add(entry)
            self.history.add(entry)
            self._on_replayed(entry, self.view)
            self._prepare_copies(entry.event)
            if isinstance(entry.event, Outcome):
                unanswered.pop(entry.event.action, None)
            for action in decision.actions:
                self._prepare_launch(action)
                if not isinstance(action, Say):
                    unanswered[action.id] = action
        self.clock.continue_from(at)
        self.registry.storage.continue_from(self.ledger.storage)
        if self.view.progress:
            self.detectors.pace.continue_from(self.ledger.best)
        return unanswered

    def _unfinished_actions(self, unanswered: dict[int, Action]) -> list[Action]:
        """Return the actions to carry out again: all but launches and stops for which the decider does not wait."""
        stale = {a.id for a in unanswered.values() if isinstance(a, Launch | Stop) and a.id != self.view.awaited}
        return [action for id, action in unanswered.items() if id not in stale]

    async def _survey_forever(self) -> None:
        """Survey the fleet again and again, one survey at a time, without holding up anything else."""
        while self.view.phase not in (Phase.ENDING, Phase.DONE):  # then nodes go because the job wants them gone
            _ = self.epoch  # a survey may act: it ends strays, and starts nodes
            self._survey_due = False
            seen = await self.fleet_watch.survey_nodes()
            if report := self.fleet_watch.find_changes(seen):
                self.process_event(report)
            for alarm in self.fleet_watch.find_losses(self.clock(), seen):
                self._on_silence(alarm)
            await self._pause_surveys()

    async def _pause_surveys(self) -> None:
        """Wait for the next survey. The wait is short if a node's link is closed: the fleet may already know that the
        node has ended, before the node counts as silent. It is short, too, if the cluster has warned a node."""
        clock = asyncio.get_running_loop().time
        until = clock() + self.fleet.survey_s
        while (left_s := until - clock()) > 0:
            await asyncio.sleep(min(left_s, LINK_LOST_S))
            if self._survey_due or self.registry.misses_link():
                return

    def survey_soon(self) -> None:
        """Survey the fleet now, not when the next survey is due: the cluster has warned a node of its end."""
        self._survey_due = True

    async def _tick_forever(self) -> None:
        tick_s = min(TICK_S, self.settings.silence.beat_s / 4)  # silence wants to be asked several times per beat
        clock = asyncio.get_running_loop().time
        while not self._done.is_set():
            asked_at = clock()
            await asyncio.sleep(tick_s)
            self.lag_s = clock() - asked_at - tick_s
            _ = self.epoch  # this process may have slept
            # Whoever called `process_event` may have survived its failure; the state it left half changed must not.
            assert not self._stepping, "a step failed; see above"
            self.check_nodes()
            if self.last.wake_at is not None and self.clock() >= self.last.wake_at:
                self.process_event(Tick())
            self.journal.flush()
            self.links.send_acks()

    def check_nodes(self) -> None:
        """Report silent nodes, cut-off nodes, slow copies of snapshots and stalls. Called at short intervals."""
        now = self.clock()
        for silent in self.registry.overdue_alarms(now):
            self._on_silence(silent)
        self.aims.tick(now)
        if self.detectors.stalls.should_look(now):
            self._spawn_task(self._look_at_ranks())
        for silent in self.detectors.stalls.check_drivers(now):
            self.announce_news(silent)
        if alarm := self.detectors.network.check_round(now):
            self.announce_news(alarm)
        self.detectors.network.ask_nodes(now)
        if self.detectors.network.should_look(now):
            self._spawn_task(self._look_for_quiet())

    def _on_silence(self, alarm: Alarm) -> None:
        self.announce_news(alarm)
        for node in alarm.suspects:
            self.registry.record_silence(node)
            self.links.hang_up(node)
            self.detectors.network.forget_node(node)
            self.dispatch.on_silent(node)

    async def _look_for_quiet(self) -> None:
        if alarm := await self.detectors.network.look_at_ranks():
            self.announce_news(alarm)

    async def _look_at_ranks(self) -> None:
        for news in await self.detectors.stalls.look_at_ranks():
            if self.detectors.stalls.is_under_way():
                self.announce_news(news)
