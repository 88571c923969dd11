"""The controller's loop: an event, a step of the decider, a line in the journal, and only then hands that act."""

import asyncio
import logging
import time
from collections.abc import Callable

from holdfast.config import Settings
from holdfast.controller.hands import Hands
from holdfast.controller.ingest import Ingest
from holdfast.core.account import Ledger
from holdfast.core.decider import Decider
from holdfast.journal.sqlite import SqliteJournal
from holdfast.model.action import Action, Launch, Say, Stop
from holdfast.model.event import Begin, Decision, Entry, Event, Outcome, Phase, Tick
from holdfast.model.topology import Job

TICK_S = 0.25
_log = logging.getLogger("holdfast.controller")


class ReplayError(Exception):
    """The journal says something else than this version of the decider would have decided."""


class Clock:
    """Wall time that never runs backwards: spans must tile it, whatever NTP or a restart does."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._wall_s = max(time.time(), not_before) - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._wall_s


class Controller:
    def __init__(self, journal: SqliteJournal, settings: Settings, hands_of: Callable[["Controller"], Hands]) -> None:
        self.journal = journal
        self.settings = settings
        self.decider = Decider()
        self.ledger = Ledger()
        self.hands = hands_of(self)
        self.ingest = Ingest(settings, self.decider, self.hands, self.hear)
        self.clock = Clock()
        self.last = Decision()
        self.reason = ""  # the newest that says something
        self.seq = 0
        self.lag_s = 0.0  # of the event loop, newest
        self.on_entry: Callable[[Entry], None] = lambda entry: None
        self._tasks: asyncio.TaskGroup
        self._done = asyncio.Event()

    async def run(self, job: Job) -> int:
        """Drive the job to its end and return its exit code."""
        unanswered = self._replay()
        self.ingest.now = self.clock
        known = {*(s.node for s in self.decider.seats), *self.decider.pool}
        self.ingest.expect(known - set(self.decider.gone))
        async with asyncio.TaskGroup() as self._tasks:
            if self.seq == 0:
                self.hear(Begin(job=job, limits=self.settings.recovery))
            self._prepare()
            for action in unanswered:
                self._tasks.create_task(self.hands.carry(action))
            self._tasks.create_task(self._tick())
            await self._done.wait()
        self.journal.close()
        return self.ledger.finish.code if self.ledger.finish else 1

    def _prepare(self) -> None:
        self.hands.job, self.hands.limits = self.decider.job, self.decider.limits

    def hear(self, event: Event) -> None:
        """One door: whatever happens comes through here."""
        now = self.clock()
        decision = self.decider.step(now, event)
        self.seq += 1
        entry = Entry(seq=self.seq, at=now, event=event, decision=decision)
        self.journal.append(entry, durable=bool(decision.actions))
        self.ledger.add(entry)
        self.on_entry(entry)
        if decision.reason and decision.reason != self.reason:
            self.reason = decision.reason
            _log.info("%s", decision.reason)
        self.last = decision
        if isinstance(event, Begin):
            self._prepare()
        for action in decision.actions:
            self._note(action)
            self._tasks.create_task(self.hands.carry(action))
        if decision.phase is Phase.DONE:
            self._done.set()

    def hurry(self) -> None:
        """Asked to stop once more: no more grace for anybody."""
        self._tasks.create_task(self.hands.hurry())

    def _note(self, action: Action) -> None:
        if isinstance(action, Launch):
            self.ingest.pace.launched(action.generation, tuple(s.node for s in action.seats))

    def _replay(self) -> list[Action]:
        """Bring the decider to where the journal ends; returns the actions that have no outcome."""
        unanswered: dict[int, Action] = {}
        at = 0.0
        for entry in self.journal.read():
            decision = self.decider.step(entry.at, entry.event)
            if decision != entry.decision:
                raise ReplayError(f"entry {entry.seq} of the journal decides otherwise under this version of holdfast")
            self.seq, at, self.last = entry.seq, entry.at, decision
            self.ledger.add(entry)
            if isinstance(entry.event, Outcome):
                unanswered.pop(entry.event.action, None)
            for action in decision.actions:
                self._note(action)
                if not isinstance(action, Say):
                    unanswered[action.id] = action
        self.clock = Clock(not_before=at)
        if self.decider.progress:
            self.ingest.pace.best = self.ledger.best
        # A launch or stop that the decider no longer waits for belongs to a generation that is over.
        stale = {a.id for a in unanswered.values() if isinstance(a, Launch | Stop) and a.id != self.decider.awaited}
        return [action for id, action in unanswered.items() if id not in stale]

    async def _tick(self) -> None:
        while not self._done.is_set():
            asked_at = time.monotonic()
            await asyncio.sleep(TICK_S)
            self.lag_s = time.monotonic() - asked_at - TICK_S
            self.ingest.tick()
            if self.last.wake_at is not None and self.clock() >= self.last.wake_at:
                self.hear(Tick())
            self.journal.flush()
