"""The controller's loop: each event steps the decider and is journaled before any action is carried out."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec

from holdfast.config import Settings
from holdfast.controller.actions.action_executor import ActionExecutor
from holdfast.controller.agent_ingest import AgentIngest
from holdfast.controller.decider_rebuild import rebuild_decider
from holdfast.core.agent_state_machine import fence_s
from holdfast.core.decide.decider import Decider
from holdfast.core.record.ledger import Ledger
from holdfast.core.release.release_history import ReleaseHistory
from holdfast.model.action import Action, Launch, Say, Stop
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.event import Begin, Decision, Entry, Event, Lost, Order, Outcome, Phase, Successor, Tick
from holdfast.model.job_seats import Job
from holdfast.model.release import Release
from holdfast.ports import Journal
from holdfast.wire.agent_messages import Hello

TICK_S = 0.25
MEET_S = 30.0  # ranks that have met before the store went away make their first step; others never do
_log = logging.getLogger("holdfast.controller")


class SteadyClock:
    """Wall time that never runs backwards, whatever NTP or a restart does: spans must cover it without gaps."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._wall_s = max(time.time(), not_before) - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._wall_s


class Controller:
    def __init__(
        self, journal: Journal, settings: Settings, hands_of: Callable[["Controller"], ActionExecutor]
    ) -> None:
        self.journal = journal
        self.settings = settings
        self._decider = Decider()
        self.view = self._decider.view
        self.ledger = Ledger()
        self.history = ReleaseHistory()
        self.archives = Path()  # of releases
        self.release = Release(number=1)  # that a new job begins with
        self.hands = hands_of(self)
        self.ingest = AgentIngest(settings, self.view, self.hands, self.process_event)
        self.ingest.releases, self.ingest.outrun = self._needed_releases, self._on_newer_node
        self.ingest.epoch = journal.epoch
        self.hands.replaying.release = lambda: self.view.running_release
        self.ingest.watching.spawn, self.ingest.watching.now = self._spawn_task, lambda: self.clock()
        # Before the journal is replayed: what was launched is watched from now on, not since the beginning of time.
        self.ingest.now = self.ingest.tracing.now = lambda: self.clock()
        self.clock_of: Callable[[float], Callable[[], float]] = SteadyClock  # one that tells no less than this
        self.clock: Callable[[], float] = self.clock_of(0.0)
        self.last = Decision()
        self.reason = ""  # the newest that says something
        self.seq = 0
        self.lag_s = 0.0  # of the event loop, newest
        self.on_entry: Callable[[Entry], None] = lambda entry: None
        self.on_replayed: Callable[[Entry], None] = lambda entry: None  # an entry of an earlier controller
        self._tasks: asyncio.TaskGroup
        self._acts: set[asyncio.Task[None]] = set()
        self._done = asyncio.Event()
        self._stepping = False

    @property
    def epoch(self) -> int:
        """The number of controllers that this run has had, including this one."""
        return self.journal.epoch

    async def run(self, job: Job, on_begun: Callable[[], None] = lambda: None) -> int:
        """Drive the job to its end and return its exit code; `on_begun` is called once orders can be taken."""
        unanswered = self._rebuild_decider()
        known = {*(s.node for s in self.view.seats), *self.view.pool, *self.view.under_probe}
        self.ingest.expect_nodes(known - set(self.view.gone))
        async with asyncio.TaskGroup() as self._tasks:
            if self.seq == 0:
                self.process_event(self._begin_event(job))
            self._prepare_executor()
            self._take_over()
            for action in self._unfinished_actions(unanswered):
                self._spawn_task(self.hands.carry_out(action))
            self._spawn_task(self._tick_forever())
            if self.view.phase is Phase.DONE:
                self._done.set()  # an earlier controller got this far
            on_begun()
            await self._done.wait()
            for task in self._acts:
                task.cancel()  # a launch may still wait for nodes that are gone
        self.journal.close()
        return self.ledger.finish.code if self.ledger.finish else 1

    def _take_over(self) -> None:
        """Tell the decider about a predecessor, which may have told nodes what the journal has lost."""
        if self.journal.doubt:
            self.hands.say(self.journal.doubt)
        plan, lost = self.hands.newest_plan(), self.journal.lost
        if lost is None and plan and plan.generation > self.view.generation:
            lost = Lost(kept=self.seq, of=0)
        if lost and plan:  # written before any node is told of a launch, and so the newest that may run
            newest = max(lost.generation, plan.generation)
            lost = msgspec.structs.replace(lost, generation=newest, nodes=plan.nodes)
        if self.view.phase is not Phase.DONE and (self.epoch > 1 or lost):
            self._announce_takeover(lost)

    def _announce_takeover(self, lost: Lost | None) -> None:
        if lost and lost.generation > self.view.generation:
            self.ingest.orphaned = lost.generation
        self.process_event(Successor(epoch=self.epoch, lost=lost))

    def _on_newer_node(self, hello: Hello) -> None:
        """Take over from a controller or generation that a node knows of but the journal and its mark do not."""
        if hello.epoch > self.epoch:
            self.journal.raise_epoch(hello.epoch + 1)
            self.ingest.epoch = self.epoch
        self._announce_takeover(Lost(kept=self.seq, of=0, generation=hello.generation))

    def _begin_event(self, job: Job) -> Begin:
        settings = self.settings
        return Begin(job=job, limits=settings.recovery, release=self.release, fence_s=fence_s(settings.node))

    def _prepare_executor(self) -> None:
        self.hands.job, self.hands.limits = self.view.job, self.view.limits
        self.hands.began_at = self.ledger.began_at

    def _needed_releases(self) -> tuple[Release, ...]:
        """Return the releases that a node needs before it can take ranks."""
        waiting = self.view.waiting_release
        return (self.view.running_release, *((waiting,) if waiting else ()))

    @property
    def reached_step(self) -> int:
        """The newest step that every rank has made, as status, metrics and the report show it."""
        step = self.ingest.pace.step if self.ingest.pace.generation == self.view.generation else -1
        return step if step >= 0 else self.ledger.step

    def on_outcome(self, outcome: Outcome) -> None:
        """Process an action's outcome, after the last steps that nodes reported before they answered."""
        self.ingest.flush_progress()
        self.process_event(outcome)

    def process_event(self, event: Event) -> None:
        """Process one event, as all must be: step the decider, journal the decision, start its actions."""
        self._stepping = True
        now = self.clock()
        decision = self._decider.step(now, event)
        self.seq += 1
        entry = Entry(seq=self.seq, at=now, event=event, decision=decision)
        # A person was told that the order is taken, so it is, whatever becomes of this controller.
        self.journal.append(entry, durable=bool(decision.actions) or isinstance(event, Order))
        self.ledger.add(entry)
        self.history.add(entry)
        self.on_entry(entry)
        if decision.reason and decision.reason != self.reason:
            self.reason = decision.reason
            _log.info("%s", decision.reason)
        self.last = decision
        if isinstance(event, Begin):
            self._prepare_executor()
        for action in decision.actions:
            self._note_action(action)
            self._spawn_task(self.hands.carry_out(action))
        if decision.phase is Phase.DONE:
            self._done.set()
        self._stepping = False

    def end_at_once(self) -> None:
        """End all nodes without grace, because a stop was ordered twice."""
        self._spawn_task(self.hands.end_at_once())

    def on_store_lost(self) -> None:
        """React to the loss of the store: ranks that are starting would wait for it as long as torch lets them."""
        if self.view.phase in (Phase.LAUNCHING, Phase.STARTING):
            self._spawn_task(self._check_starting(self.view.generation))

    async def _check_starting(self, generation: int) -> None:
        await asyncio.sleep(MEET_S)
        self.ingest.flush_progress()
        if self.view.generation == generation and self.view.phase in (Phase.LAUNCHING, Phase.STARTING):
            reason = "the store went away while ranks were starting, and they have made no step since"
            now = self.clock()
            alarm = Alarm(kind=Kind.CRASH, at=now, suspects=(), reason=reason, generation=generation, signature="store")
            self.process_event(alarm)

    def _spawn_task(self, deed: Coroutine[None, None, None]) -> None:
        task = self._tasks.create_task(deed)
        self._acts.add(task)
        task.add_done_callback(self._acts.discard)

    def _note_action(self, action: Action) -> None:
        if isinstance(action, Launch):
            self.ingest.on_launch(action)

    def _rebuild_decider(self) -> dict[int, Action]:
        """Bring the decider to where the journal ends; returns the actions that have no outcome, by id."""
        unanswered: dict[int, Action] = {}
        at = 0.0
        for entry in rebuild_decider(self.journal, self._decider):
            decision = entry.decision
            self.seq, at, self.last = entry.seq, entry.at, decision
            self.ledger.add(entry)
            self.history.add(entry)
            self.on_replayed(entry)
            if isinstance(entry.event, Outcome):
                unanswered.pop(entry.event.action, None)
            for action in decision.actions:
                self._note_action(action)
                if not isinstance(action, Say):
                    unanswered[action.id] = action
        self.clock = self.clock_of(at)
        if self.view.progress:
            self.ingest.pace.best = self.ledger.best
        return unanswered

    def _unfinished_actions(self, unanswered: dict[int, Action]) -> list[Action]:
        """Return the actions to carry out again; not launches and stops that the decider no longer waits for."""
        stale = {a.id for a in unanswered.values() if isinstance(a, Launch | Stop) and a.id != self.view.awaited}
        return [action for id, action in unanswered.items() if id not in stale]

    async def _tick_forever(self) -> None:
        tick_s = min(TICK_S, self.settings.silence.beat_s / 4)  # silence wants to be asked several times per beat
        clock = asyncio.get_running_loop().time
        while not self._done.is_set():
            asked_at = clock()
            await asyncio.sleep(tick_s)
            self.lag_s = clock() - asked_at - tick_s
            # Whoever called `process_event` may have survived its failure; the state it left half changed must not.
            assert not self._stepping, "a step failed; see above"
            self.ingest.tick()
            if self.last.wake_at is not None and self.clock() >= self.last.wake_at:
                self.process_event(Tick())
            self.journal.flush()
            self.ingest.acknowledge_posts()
