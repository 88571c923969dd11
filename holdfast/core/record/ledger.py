"""The ledger: it folds the journal into spans that cover every second of the job without gap or overlap."""

from collections.abc import Iterable
from enum import StrEnum
from itertools import pairwise

import msgspec

from holdfast.core.incident import incident_text
from holdfast.model.action import Finish, Launch
from holdfast.model.alarm import OPINION, Alarm
from holdfast.model.event import Begin, Entry, Phase, Progress
from holdfast.model.incident_record import Change, Record, Remedy
from holdfast.model.release import Release

START_AND_END = "start and end"  # the cause of time before the first step and after the last one
PLANNED = "planned restarts"  # the cause of what they cost
UNSETTLED = "open incident"  # of what an incident has cost whose cause is not known yet


class TimeUse(StrEnum):
    """The use of a second of the job's time; only TRAIN is productive."""

    TRAIN = "train"
    REDO = "redo"
    DETECT = "detect"
    STOP = "stop"
    DIAGNOSE = "diagnose"
    LAUNCH = "launch"
    START_UP = "start-up"
    WAIT = "wait"
    UPDATE = "update"
    HOLD = "hold"
    STALL = "stall"  # it stood, and went on by itself
    RUN = "run"  # ranks ran in a job that has shown no step: what they did is not known


_USES = {
    Phase.WAITING: TimeUse.WAIT,
    Phase.LAUNCHING: TimeUse.LAUNCH,
    Phase.STARTING: TimeUse.START_UP,  # imports, groups, state and first step: the ranks' own business
    Phase.TRAINING: TimeUse.TRAIN,
    Phase.STOPPING: TimeUse.STOP,
    Phase.PROBING: TimeUse.DIAGNOSE,
    Phase.PAUSING: TimeUse.UPDATE,
    Phase.HELD: TimeUse.HOLD,
    Phase.ENDING: TimeUse.STOP,
}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    use: TimeUse
    start_at: float
    end_at: float
    incident: int = 0  # 0: none
    change: int = 0  # of a planned restart

    @property
    def seconds(self) -> float:
        return self.end_at - self.start_at


class ReleaseRun(msgspec.Struct, frozen=True, kw_only=True):
    """How many generations and new steps a job made under one release."""

    release: int
    source: str
    generations: int = 0
    steps: int = 0  # that nobody had made before


class Account(msgspec.Struct, frozen=True, kw_only=True):
    start_at: float
    end_at: float
    spans: tuple[Span, ...]
    incidents: tuple[Record, ...]
    changes: tuple[Change, ...]
    ran: tuple[ReleaseRun, ...]
    phase: Phase
    generation: int
    step: int
    stepped: bool = False  # whether a step was ever seen; without one nobody knows which time was productive
    since: str = ""  # what steps are counted from; "": they have the script's own numbers, or those of its optimizer
    code: int | None = None  # of a finished job
    ending: str = ""
    opinions: tuple[str, ...] = ()  # of language models and people, on incidents

    @property
    def wall_s(self) -> float:
        return self.end_at - self.start_at

    def spent_s(self, use: TimeUse) -> float:
        return sum(s.seconds for s in self.spans if s.use is use)

    @property
    def ettr(self) -> float | None:
        """Return the productive share of the wall time; None if no step was ever seen."""
        return self.spent_s(TimeUse.TRAIN) / self.wall_s if self.stepped and self.wall_s > 0 else None

    @property
    def at_most(self) -> str:
        """Return "at most " if the ETTR may count redone work as new, because a resumed step is unknown; else ""."""
        mended = (r for r in self.incidents if r.verdict.remedy is not Remedy.GIVE_UP)
        sure = not any(incident_text.describe_unknown_resume(r) for r in mended) and not any(
            incident_text.describe_unknown_resume(c) for c in self.changes
        )
        return "" if sure else "at most "

    @property
    def mttr_s(self) -> float | None:
        """Return the mean time of repaired incidents from the last good step to the next one; None without any."""
        times = [r.resumed_at - r.good_at for r in self.incidents if r.verdict.remedy is not Remedy.GIVE_UP]
        return sum(times) / len(times) if times else None

    def lost_s(self) -> dict[str, float]:
        """Return the seconds lost by cause, redone work included."""
        causes = {r.number: r.klass or r.kind for r in self.incidents}
        lost: dict[str, float] = {}
        for span in self.spans:
            if span.use not in (TimeUse.TRAIN, TimeUse.RUN):
                beside = PLANNED if span.change else "stall" if span.use is TimeUse.STALL else START_AND_END
                cause = causes.get(span.incident, UNSETTLED) if span.incident else beside
                lost[cause] = lost.get(cause, 0.0) + span.seconds
        return lost


class Ledger:
    """Takes journal entries one by one; `make_account` may be called at any time."""

    def __init__(self) -> None:
        self.phase = Phase.NEW
        self.generation = 0
        self.best = -1  # furthest step told by the script
        self.step = -1  # newest, of whichever generation
        self.progress: Progress | None = None  # of this generation
        self._newest: Progress | None = None  # of whichever
        self.incidents: list[Record] = []
        self.changes: list[Change] = []
        self.opinions: list[str] = []
        self.admitting: frozenset[str] = frozenset()  # nodes that are new in this generation, which has no step yet
        self.finish: Finish | None = None
        self._stepped_ever = False
        self._is_from_zero = False  # steps that the script does not tell are counted from the start of this run
        self._ran: dict[int, ReleaseRun] = {}
        self._release = 0
        self._seated: frozenset[str] = frozenset()
        self._spans: list[Span] = []
        self._start_at: float | None = None
        self._at = 0.0  # up to here the clock is tiled
        self._last_at = 0.0
        self._good_at = 0.0  # of the newest step that was heard of
        self._incident = 0  # open, or whose work is being redone
        self._change = 0  # the same of a planned restart
        self._redo_to: int | None = None
        self._cut: tuple[int, Span] | None = None  # the train span that was ended, by its index, and what came instead

    def add(self, entry: Entry) -> None:
        if self._start_at is None:
            self._start_at = self._at = entry.at
        self._last_at = max(self._last_at, entry.at)
        decision, event = entry.decision, entry.event
        before = self.progress
        if isinstance(event, Begin):
            self._set_release(event.release)
        if isinstance(event, Progress) and event.generation == self.generation:
            self._is_from_zero |= not self._stepped_ever and event.numbered and event.first_step <= 1
            self.progress, self._stepped_ever = event, True
            if decision.phase is Phase.TRAINING:  # later ones may be of ranks that an incident has given up
                self._good_at = max(self._good_at, event.at)
        if decision.phase is not self.phase:
            self._enter_phase(entry.at, decision.phase)
        if decision.closed:
            self.incidents.append(decision.closed)
            self._on_recovery(decision.closed)
        if isinstance(event, Alarm) and event.signature == OPINION:
            self.opinions.append(event.reason)
        if decision.changed:
            self.changes.append(decision.changed)
            self._on_recovery(decision.changed)
        if decision.stood_since is not None and self.progress:
            self._add_stall(decision.stood_since, self.progress.at)
        if self.progress is not before and self.progress:
            self._on_progress(before, self.progress)
        for action in decision.actions:
            if isinstance(action, Finish):
                self.finish = action
            elif isinstance(action, Launch):
                self._on_launch(action)

    @property
    def began_at(self) -> float:
        """Return when the job began; 0 if it has not."""
        return self._start_at or 0.0

    def make_account(self, now: float | None = None) -> Account:
        """Return the account so far; `now` extends it beyond the last entry of a job that still runs."""
        start_at = self._start_at if self._start_at is not None else 0.0
        end_at = self._last_at if self.phase is Phase.DONE or now is None else max(now, self._last_at)
        spans = list(self._spans)
        if end_at > self._at and self.phase in _USES:
            spans.append(self._make_span(self._current_use(), self._at, end_at))
        elif self._start_at is not None:
            end_at = self._at
        if not self._stepped_ever:  # ranks that make no steps restore nothing that we know of
            spans = [msgspec.structs.replace(s, use=TimeUse.RUN) if s.use is TimeUse.START_UP else s for s in spans]
        assert all(a.end_at == b.start_at for a, b in pairwise(spans)), "spans leave a gap or overlap"
        assert not spans or (spans[0].start_at == start_at and spans[-1].end_at == end_at), "spans miss an end"
        return Account(
            start_at=start_at,
            end_at=end_at,
            spans=tuple(spans),
            incidents=tuple(self.incidents),
            changes=tuple(self.changes),
            ran=tuple(ran for ran in self._ran.values() if ran.generations),
            phase=self.phase,
            generation=self.generation,
            step=self.step,
            stepped=self._stepped_ever,
            since=self._counted_since(),
            code=self.finish.code if self.finish else None,
            ending=self.finish.reason if self.finish else "",
            opinions=tuple(self.opinions),
        )

    def settle_account(self, now: float) -> Account:
        """Return the account without time that a later entry may change. Counters use it, because they must not fall.

        Training is settled up to the newest step, because an alarm takes back the time after it. A launch is settled
        at the first step, because that step may be older than its report. Until the job makes a step or ends, it is
        not known whether its ranks restored their state or ran.
        """
        account = self.make_account(now)
        if self.phase is Phase.DONE:
            return account
        spans = list(self._spans)
        if self._cut is not None:
            spans[self._cut[0]] = _clip_span(spans[self._cut[0]], self._good_at)
        if self.phase in _USES and self.phase not in (Phase.LAUNCHING, Phase.STARTING):
            until = self._good_at if self.phase is Phase.TRAINING else account.end_at
            spans.append(self._make_span(self._current_use(), self._at, max(self._at, until)))
        if not self._stepped_ever:
            spans = [span for span in spans if span.use is not TimeUse.START_UP]
        return msgspec.structs.replace(account, spans=tuple(spans))

    def _counted_since(self) -> str:
        """Return since when the newest step was counted; "" if the script or its optimizer gave the step's number."""
        newest = self._newest
        if newest is not None and newest.counted:
            return "the last launch"
        return "the start of this run" if newest is not None and newest.numbered and self._is_from_zero else ""

    def _current_use(self) -> TimeUse:
        use = _USES[self.phase]
        return TimeUse.REDO if use is TimeUse.TRAIN and self._redo_to is not None else use

    def _make_span(self, use: TimeUse, start_at: float, end_at: float) -> Span:
        return Span(use=use, start_at=start_at, end_at=end_at, incident=self._incident, change=self._change)

    def _close_span(self, at: float) -> None:
        """Add a span up to `at` for the current use of time."""
        at = max(at, self._at)
        if at > self._at and self.phase in _USES:
            self._spans.append(self._make_span(self._current_use(), self._at, at))
            self._at = at

    def _add_stall(self, since: float, until: float) -> None:
        self._close_span(since)
        if until > self._at:
            self._spans.append(self._make_span(TimeUse.STALL, self._at, until))
            self._at = until

    def _enter_phase(self, at: float, phase: Phase) -> None:
        if phase is Phase.TRAINING and self.progress:
            at = min(at, self.progress.first_at)  # heard later than it happened
        self._close_span(at)
        if phase in (Phase.STOPPING, Phase.PAUSING):
            # An incident that has not come to a step goes on through a pause.
            mending = self._incident and self._redo_to is None
            ran = self.phase is Phase.STARTING and not self._stepped_ever and not (self._incident or self._change)
            stopping, self._redo_to = phase is Phase.STOPPING, None
            trouble = stopping or mending
            self._incident, self._change = (len(self.incidents) + 1, 0) if trouble else (0, len(self.changes) + 1)
            uses = (TimeUse.START_UP,) if ran else (TimeUse.TRAIN, TimeUse.REDO) if self.phase is Phase.TRAINING else ()
            if self._spans and self._spans[-1].use in uses:
                use = TimeUse.DETECT if stopping else TimeUse.UPDATE
                self._cut = len(self._spans) - 1, self._make_span(use, self._at, self._at)
        if phase is Phase.LAUNCHING:
            self.generation += 1
            self.progress = None
        if phase is Phase.TRAINING:
            self.admitting = frozenset()
        if phase is Phase.ENDING:
            self._incident, self._change, self._redo_to = 0, 0, None
        self.phase = phase

    def _on_launch(self, launch: Launch) -> None:
        nodes = frozenset(seat.node for seat in launch.seats)
        self.admitting = nodes - self._seated if self._seated else frozenset()
        self._seated = nodes
        if launch.release.number:
            self._set_release(launch.release)
        ran = self._ran[self._release]
        self._ran[self._release] = msgspec.structs.replace(ran, generations=ran.generations + 1)

    def _set_release(self, release: Release) -> None:
        self._release = release.number
        self._ran.setdefault(release.number, ReleaseRun(release=release.number, source=release.source))

    def _on_progress(self, before: Progress | None, event: Progress) -> None:
        if self._redo_to is not None and event.step >= self._redo_to:
            self._close_span(_reached_at(self._redo_to, before, event))
            self._redo_to, self._incident, self._change = None, 0, 0
        if event.renumbers(before):
            self.best = -1
        self.step, self._newest = event.step, event
        done = before.step if before else event.first_step - 1
        if not event.counted:
            done, self.best = max(done, self.best), max(self.best, event.step)
        ran = self._ran[self._release]
        self._ran[self._release] = msgspec.structs.replace(ran, steps=ran.steps + max(0, event.step - done))

    def _on_recovery(self, record: Record | Change) -> None:
        """Backdate a finished incident or planned restart to the last good step, and start to count redone steps."""
        self._backdate_span(record)
        if self.phase is not Phase.TRAINING:
            return
        if record.resumed_from is not None and record.resumed_from < self.best:
            self._redo_to = self.best
        else:
            self._incident = self._change = 0

    def _backdate_span(self, record: Record | Change) -> None:
        """Move the end of the training span back from the alarm or the order to the last good step."""
        if self._cut is None:
            return
        index, instead = self._cut
        span = self._spans[index]
        if record.good_at > span.end_at:
            return  # of a later generation, which a planned restart had started
        good_at = max(record.good_at, span.start_at)
        if good_at < span.end_at:
            kept = msgspec.structs.replace(span, end_at=good_at)
            lost = msgspec.structs.replace(instead, start_at=good_at, end_at=span.end_at)
            self._spans[index : index + 1] = [kept, lost] if kept.seconds > 0 else [lost]
        self._cut = None


def _clip_span(span: Span, end_at: float) -> Span:
    return msgspec.structs.replace(span, end_at=max(span.start_at, min(span.end_at, end_at)))


def _reached_at(step: int, before: Progress | None, after: Progress) -> float:
    """Return the time at which a step was reached, interpolated between two reports."""
    at, done = (before.at, before.step) if before else (after.first_at, after.first_step)
    if after.step <= done:
        return after.at
    return at + (after.at - at) * max(0, step - done) / (after.step - done)


def fold_entries(entries: Iterable[Entry], now: float | None = None) -> Account:
    ledger = Ledger()
    for entry in entries:
        ledger.add(entry)
    return ledger.make_account(now)
