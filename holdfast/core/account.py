"""Every second of the job, folded from its journal into spans that tile the wall clock."""

from collections.abc import Iterable
from enum import StrEnum
from itertools import pairwise

import msgspec

from holdfast.model.action import Finish
from holdfast.model.event import Entry, Phase, Progress
from holdfast.model.verdict import Record, Remedy


class Use(StrEnum):
    """What a second was spent on; only TRAIN is productive."""

    TRAIN = "train"
    REDO = "redo"
    DETECT = "detect"
    STOP = "stop"
    DIAGNOSE = "diagnose"
    LAUNCH = "launch"
    RESTORE = "restore"
    WAIT = "wait"


_USES = {
    Phase.WAITING: Use.WAIT,
    Phase.LAUNCHING: Use.LAUNCH,
    Phase.STARTING: Use.RESTORE,  # group set-up, state and first step: the ranks' own business
    Phase.TRAINING: Use.TRAIN,
    Phase.STOPPING: Use.STOP,
    Phase.PROBING: Use.DIAGNOSE,
    Phase.ENDING: Use.STOP,
}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    use: Use
    start_at: float
    end_at: float
    incident: int = 0  # 0: none

    @property
    def seconds(self) -> float:
        return self.end_at - self.start_at


class Account(msgspec.Struct, frozen=True, kw_only=True):
    start_at: float
    end_at: float
    spans: tuple[Span, ...]
    incidents: tuple[Record, ...]
    phase: Phase
    generation: int
    step: int
    code: int | None = None  # of a finished job
    ending: str = ""

    @property
    def wall_s(self) -> float:
        return self.end_at - self.start_at

    def spent_s(self, use: Use) -> float:
        return sum(s.seconds for s in self.spans if s.use is use)

    @property
    def ettr(self) -> float:
        """Productive share of the wall time."""
        return self.spent_s(Use.TRAIN) / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def mttr_s(self) -> float | None:
        """Mean time from the last good step to the next one, of what was repaired."""
        times = [r.resumed_at - r.good_at for r in self.incidents if r.verdict.remedy is not Remedy.GIVE_UP]
        return sum(times) / len(times) if times else None

    def lost_s(self) -> dict[str, float]:
        """Seconds lost by cause, redone work included."""
        causes = {r.number: r.klass or r.kind for r in self.incidents}
        lost: dict[str, float] = {}
        for span in self.spans:
            if span.use is not Use.TRAIN:
                cause = causes.get(span.incident, "open incident") if span.incident else "start and end"
                lost[cause] = lost.get(cause, 0.0) + span.seconds
        return lost


class Ledger:
    """Folds entries one by one; `account` may be asked at any time."""

    def __init__(self) -> None:
        self.phase = Phase.NEW
        self.generation = 0
        self.best = -1  # furthest step told by the script
        self.step = -1  # newest, of whichever generation
        self.progress: Progress | None = None  # of this generation
        self.incidents: list[Record] = []
        self.finish: Finish | None = None
        self._spans: list[Span] = []
        self._start_at: float | None = None
        self._at = 0.0  # up to here the clock is tiled
        self._last_at = 0.0
        self._incident = 0  # open, or whose work is being redone
        self._redo_to: int | None = None
        self._trained: int | None = None  # index of the train span that the open incident ended

    def add(self, entry: Entry) -> None:
        if self._start_at is None:
            self._start_at = self._at = entry.at
        self._last_at = max(self._last_at, entry.at)
        decision, event = entry.decision, entry.event
        before = self.progress
        if isinstance(event, Progress) and event.generation == self.generation:
            self.progress = event
        if decision.phase is not self.phase:
            self._turn(entry.at, decision.phase)
        if decision.closed:
            self._close(decision.closed)
        if self.progress is not before and self.progress:
            self._stepped(before, self.progress)
        for action in decision.actions:
            if isinstance(action, Finish):
                self.finish = action

    def account(self, now: float | None = None) -> Account:
        """The account so far; `now` extends it beyond the last entry of a job that still runs."""
        start_at = self._start_at if self._start_at is not None else 0.0
        end_at = self._last_at if self.phase is Phase.DONE or now is None else max(now, self._last_at)
        spans = list(self._spans)
        if end_at > self._at and self.phase in _USES:
            spans.append(Span(use=self._use(), start_at=self._at, end_at=end_at, incident=self._incident))
        elif self._start_at is not None:
            end_at = self._at
        assert all(a.end_at == b.start_at for a, b in pairwise(spans)), "spans leave a gap or overlap"
        assert not spans or (spans[0].start_at == start_at and spans[-1].end_at == end_at), "spans miss an end"
        return Account(
            start_at=start_at,
            end_at=end_at,
            spans=tuple(spans),
            incidents=tuple(self.incidents),
            phase=self.phase,
            generation=self.generation,
            step=self.step,
            code=self.finish.code if self.finish else None,
            ending=self.finish.reason if self.finish else "",
        )

    def _use(self) -> Use:
        use = _USES[self.phase]
        return Use.REDO if use is Use.TRAIN and self._redo_to is not None else use

    def _mark(self, at: float) -> None:
        """The clock up to `at` was spent as the present phase says."""
        at = max(at, self._at)
        if at > self._at and self.phase in _USES:
            self._spans.append(Span(use=self._use(), start_at=self._at, end_at=at, incident=self._incident))
            self._at = at

    def _turn(self, at: float, phase: Phase) -> None:
        if phase is Phase.TRAINING and self.progress:
            at = min(at, self.progress.first_at)  # heard later than it happened
        self._mark(at)
        if phase is Phase.STOPPING:
            self._redo_to = None
            self._incident = len(self.incidents) + 1
            if self.phase is Phase.TRAINING and self._spans and self._spans[-1].use in (Use.TRAIN, Use.REDO):
                self._trained = len(self._spans) - 1
        if phase is Phase.LAUNCHING:
            self.generation += 1
            self.progress = None
        if phase is Phase.ENDING:
            self._incident, self._redo_to = 0, None
        self.phase = phase

    def _stepped(self, before: Progress | None, event: Progress) -> None:
        if self._redo_to is not None and event.step >= self._redo_to:
            self._mark(_reached(self._redo_to, before, event))
            self._redo_to, self._incident = None, 0
        self.step = event.step
        if not event.counted:
            self.best = max(self.best, event.step)

    def _close(self, record: Record) -> None:
        self.incidents.append(record)
        self._backdate(record)
        if self.phase is not Phase.TRAINING:
            return
        if record.resumed_from is not None and record.resumed_from < self.best:
            self._redo_to = self.best
        else:
            self._incident = 0

    def _backdate(self, record: Record) -> None:
        """Training ended at the last good step, not at the alarm."""
        if self._trained is None:
            return
        span = self._spans[self._trained]
        good_at = min(max(record.good_at, span.start_at), span.end_at)
        if good_at < span.end_at:
            kept = msgspec.structs.replace(span, end_at=good_at)
            lost = Span(use=Use.DETECT, start_at=good_at, end_at=span.end_at, incident=record.number)
            self._spans[self._trained : self._trained + 1] = [kept, lost] if kept.seconds > 0 else [lost]
        self._trained = None


def _reached(step: int, before: Progress | None, after: Progress) -> float:
    """When a step was reached, between two reports."""
    at, done = (before.at, before.step) if before else (after.first_at, after.first_step)
    if after.step <= done:
        return after.at
    return at + (after.at - at) * max(0, step - done) / (after.step - done)


def fold(entries: Iterable[Entry], now: float | None = None) -> Account:
    ledger = Ledger()
    for entry in entries:
        ledger.add(entry)
    return ledger.account(now)
