"""The ledger: it folds the journal into spans that cover every second of the job without gap or overlap."""

from collections.abc import Iterable
from itertools import pairwise

import msgspec

from holdfast.core.incident import incident_text
from holdfast.core.record.job_account import FROM_START, Account, RedoneSteps, ReleaseRun, Span, TimeUse, UnwatchedTime
from holdfast.core.record.job_ending import describe_early_end, describe_end, read_storage
from holdfast.core.record.open_trouble import StandingFold
from holdfast.core.record.owed_steps import OwedSteps
from holdfast.core.record.release_pace import ReleasePaces
from holdfast.core.record.report_only_alarms import AlarmNotices
from holdfast.core.record.span_cuts import ALONE, TRAINED, USES, OpenStandstill, book_stall, find_first_cut, split_end
from holdfast.model.action import Finish, Launch, Say
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Begin, Ended, Progress, SlowTime, Successor
from holdfast.model.detector_alarm import LEFT, OPINION, Alarm
from holdfast.model.incident_record import Change, Record, is_given_up
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.model.stored_checkpoint_report import StorageReport

_OF_NONE = (TimeUse.END, TimeUse.HOLD, *ALONE)  # uses that no incident or planned restart costs


class Ledger:
    """Takes journal entries one by one; `make_account` may be called at any time."""

    def __init__(self) -> None:
        self.phase, self.generation = Phase.NEW, 0
        self.best, self.step = -1, -1  # furthest step told by the script; newest step, of whichever generation
        self.progress: Progress | None = None  # of this generation
        self.newest: Progress | None = None  # of whichever
        self.incidents: list[Record] = []
        self.changes: list[Change] = []
        self.opinions, self._lost_standbys = list[str](), list[str]()
        self._notices = AlarmNotices()
        self._slow_times = dict[float, SlowTime]()
        self._standing = StandingFold()
        self.admitting: frozenset[str] = frozenset()  # nodes that are new in this generation, which has no step yet
        self.finish: Finish | None = None
        self._early_end = ""  # as in Account
        self.storage: StorageReport | None = None  # None: no node has told of any
        self._stepped_ever = False
        self._is_from_zero = False  # steps that the script does not tell are counted from the start of this run
        self._ran: dict[int, ReleaseRun] = {}
        self._owed = OwedSteps()
        self.paces = ReleasePaces()
        self._release = 0
        self._stepped_in = 0  # the release that made the newest step
        self._seated: frozenset[str] = frozenset()
        self._spans: list[Span] = []
        self._start_at: float | None = None
        self._at, self._last_at = 0.0, 0.0  # up to here the clock is tiled; time of the newest entry
        self._good_at = 0.0  # of the newest step that was heard of
        self._incident, self._change = 0, 0  # open incident or planned restart, or whose work is being redone
        self._redo_to: int | None = None
        self._parted = False  # ranks of this generation have made their last step
        self._unwatched: list[UnwatchedTime] = []
        self._taken_over_at: float | None = None  # no step is known to have been made since
        self._alone_since = 0.0
        self._is_over = False  # the script had ended by itself before somebody took over
        self._told = False  # since then somebody said how far ranks had come
        self._standstill = OpenStandstill()
        self._cut: tuple[int, Span] | None = None  # the span that a stop ended, by its index, and what came instead

    def add(self, entry: Entry) -> None:
        if self._start_at is None:
            told_at = entry.event.started_at if isinstance(entry.event, Begin) else 0.0
            self._start_at = self._at = min(entry.at, told_at or entry.at)
        self._watch_takeover(entry)
        self._last_at = max(self._last_at, entry.at)
        self.paces.add(entry)
        decision, event = entry.decision, entry.event
        before = self.progress
        if self.phase is Phase.TRAINING or isinstance(event, Progress):
            self._standstill.add(event, self.generation)
        if isinstance(event, Begin):
            self._set_release(event.release)
        if isinstance(event, Progress) and event.generation == self.generation:
            self._is_from_zero |= not self._stepped_ever and event.numbered and event.first_step <= 1
            self.progress, self._stepped_ever = event, True
            if decision.phase is Phase.TRAINING:  # later ones may be of ranks that an incident has given up
                self._good_at = max(self._good_at, event.at)
        if isinstance(event, Ended) and decision.phase is Phase.ENDING and self.phase is Phase.TRAINING:
            self._is_over = self._told and event.departed
            self._set_parted(True, max(self._last_known_at, self.progress.last_at if self.progress else 0.0))
        if decision.changed and decision.changed.failed:
            self._end_failed_change(decision.changed.resumed_at, entry.at)
        if decision.phase is not self.phase:
            self._enter_phase(entry.at, decision.phase)
        if decision.closed:
            self.incidents.append(decision.closed)
            self._on_recovery(decision.closed, RedoneSteps(incident=decision.closed.number))
        self.storage = read_storage(event) or self.storage
        if isinstance(event, SlowTime):
            self._slow_times[event.since] = event
        if isinstance(event, Alarm) and event.signature == OPINION:
            self.opinions.append(event.reason)
        self._notices.add(entry)
        self._standing.add(entry)
        if decision.changed:
            self.changes.append(decision.changed)
            self._on_recovery(decision.changed, RedoneSteps(change=len(self.changes)))
        if decision.stood_since is not None and self.progress:
            self._add_stall(decision.stood_since, self.progress.at)
        if self.progress is not before and self.progress:
            self._on_progress(before, self.progress)
        for action in decision.actions:
            if isinstance(action, Finish):
                self.finish, self._early_end = action, describe_early_end(event)
            elif isinstance(action, Say) and (action.standbys or action.text.startswith("standby ")):  # older journals
                self._lost_standbys.append(action.text)
            elif isinstance(action, Launch):
                self._on_launch(action)

    def _watch_takeover(self, entry: Entry) -> None:
        """Record a time without a controller, and whether a later event tells of the ranks' work in that time."""
        match entry.event:
            case Successor(alone_since=since):
                alone_at = min(max(since, self._last_at), entry.at)
                self._unwatched.append(UnwatchedTime(since=since and alone_at, until=entry.at))
                if self.phase in (Phase.LAUNCHING, Phase.STARTING, Phase.TRAINING):
                    self._taken_over_at, self._told, self._alone_since = entry.at, False, alone_at
            case Progress(generation=generation, at=at) if generation == self.generation:
                if not self._told:
                    self._divide_unknown(at)
                self._told = True
                if self._taken_over_at is not None and at > self._taken_over_at:
                    self._taken_over_at = None
            case Ended() if self.progress is None:  # else it does not say when the last step was made
                self._told = True
            case Alarm(signature=signature) if signature == LEFT and self.progress is None:
                self._told = True

    def _divide_unknown(self, at: float) -> None:
        """Divide unknown time without a controller: until `at`, ranks made steps, and then they made none."""
        for index, (trained, alone) in enumerate(pairwise(self._spans)):
            ends_now = alone.use is TimeUse.UNKNOWN and alone.end_at == self._taken_over_at
            if ends_now and trained.use in TRAINED:
                at = alone.clip_end(at).end_at
                unwatched = msgspec.structs.replace(alone, use=TimeUse.UNWATCHED, start_at=at)
                self._spans[index : index + 2] = [msgspec.structs.replace(trained, end_at=at), unwatched]

    @property
    def _last_known_at(self) -> float:
        """Return until when ranks are known to have trained: until their newest step. After a takeover, before steps
        are reported, it is at least until the old controller's last sign of life."""
        untold = self._taken_over_at is not None and not self._told
        return max(self._good_at, self._alone_since) if untold else self._good_at

    @property
    def began_at(self) -> float:
        """Return when the job began; 0 if it has not."""
        return self._start_at or 0.0

    def make_account(self, now: float | None = None) -> Account:
        """Return the account so far; `now` extends it beyond the last entry of a job that still runs."""
        end_at = self._last_at if self.phase is Phase.DONE or now is None else max(now, self._last_at)
        # The record of an incident says when it is closed what it cost; that a stand was no training is known before.
        spans = list(self._spans) if self._standstill.since is None else self._spans_cut_at(self._standstill.since)
        if end_at > self._at and self.phase in USES:
            spans += self._standstill.split_newest(self._current_spans(end_at))
        elif self._start_at is not None:
            end_at = self._at
        if not self._stepped_ever:  # ranks that make no steps restore nothing that we know of
            spans = [msgspec.structs.replace(s, use=TimeUse.RUN) if s.use is TimeUse.START_UP else s for s in spans]
        assert all(a.end_at == b.start_at for a, b in pairwise(spans)), "spans leave a gap or overlap"
        assert not spans or (spans[0].start_at == self.began_at and spans[-1].end_at == end_at), "spans miss an end"
        code, ending = describe_end(self.finish, self.storage, done=self.phase is Phase.DONE)
        return Account(
            start_at=self.began_at,
            end_at=end_at,
            spans=tuple(spans),
            incidents=tuple(self.incidents),
            changes=tuple(self.changes),
            ran=self.list_releases(),
            redone=tuple(self._owed.redone),
            unwatched=tuple(self._unwatched),
            phase=self.phase,
            standing=self._standing.standing,
            generation=self.generation,
            step=self.step,
            step_at=self.newest.at if self.newest else 0.0,
            stepped=self._stepped_ever,
            since=self._counted_since(),
            code=code,
            ending=ending,
            early_end=self._early_end if self.finish else "",
            storage=self.storage,
            opinions=tuple(self.opinions),
            slow=tuple(self._notices.slow),
            slow_times=tuple(self._slow_times.values()),
            losses=tuple(self._notices.losses),
            lost_standbys=tuple(self._lost_standbys),
            paces=self.paces.list_paces(),
        )

    def list_releases(self, reached: int = -1) -> tuple[ReleaseRun, ...]:
        """Return the generations and steps made under each release that was ever launched. `reached` is the newest
        step, which the journal may lack, or -1 if unknown."""
        (new, redone), now = self._count_unheard(reached), self._release
        made = [run.add_steps(new, redone) if run.release == now else run for run in self._ran.values()]
        return tuple(run for run in made if run.generations)

    def count_redone(self, step: int) -> int:
        """Return how many steps were made again up to `step`, which may be newer than the journal's newest report."""
        return sum(ran.redone for ran in self._ran.values()) + self._count_unheard(step)[1]

    def _count_unheard(self, reached: int) -> tuple[int, int]:
        """Return how many new and how many redone steps lie between the journal's newest report and step `reached`."""
        made = max(0, reached - self.progress.step) if self.progress else 0
        new = made if self.progress and self.progress.counted else min(made, max(0, reached - self.best))
        return new, made - new

    def settle_account(self, now: float) -> Account:
        """Return the account without time that a later entry may change, for counters, which must never fall.

        Training counts up to the newest step, because an alarm would make later time lost. A launch counts once its
        first step is made: the step may be older than its report. A pause counts once it is over: it may turn into an
        incident. Until the job makes a step or ends, it is unknown whether ranks restored their state or ran.
        """
        account = self.make_account(now)
        if self.phase is Phase.DONE:
            return account
        spans = list(self._spans)
        if self._cut is not None:
            first = find_first_cut(self._spans, self._cut[0], self._good_at)
            spans[first : self._cut[0] + 1] = [spans[first].clip_end(self._good_at)]
        if self.phase in USES and self.phase not in (Phase.LAUNCHING, Phase.STARTING, Phase.PAUSING):
            until = self._good_at if self.phase is Phase.TRAINING else account.end_at
            spans.append(self._make_span(self._current_use(), self._at, max(self._at, until)))
        if not self._stepped_ever:
            spans = [span for span in spans if span.use is not TimeUse.START_UP]
        return msgspec.structs.replace(account, spans=tuple(spans))

    def _counted_since(self) -> str:
        """Return in words since when steps are counted: the last launch or this run's start; "" for neither."""
        newest = self.newest
        if newest is not None and newest.counted:
            return "the last launch"
        return FROM_START if newest is not None and newest.numbered and self._is_from_zero else ""

    def _current_use(self) -> TimeUse:
        use = USES[self.phase]
        if use is TimeUse.HOLD and self._standing.asks_only:
            return TimeUse.ASK
        if use is not TimeUse.TRAIN:
            return use
        return TimeUse.END if self._parted else TimeUse.REDO if self._redo_to is not None else use

    def _current_spans(self, until: float) -> list[Span]:
        """Return the spans since the last closed span: one, or several if the controller was away for some time."""
        use, at, taken_over_at = self._current_use(), self._at, self._taken_over_at
        mending = self.phase is not Phase.TRAINING and (self._incident or self._change)  # then it is their cost
        if taken_over_at is None or taken_over_at <= at or mending:
            return [self._make_span(use, at, until)]
        alone_at = self._last_known_at if self.progress and not self._parted else self._alone_since
        unwatched = TimeUse.OVER if self._is_over else TimeUse.UNWATCHED if self._told else TimeUse.UNKNOWN
        found = []
        for part, end_at in ((use, alone_at), (unwatched, taken_over_at), (use, until)):
            end_at = min(max(end_at, at), until)
            if end_at > at:
                found.append(self._make_span(part, at, end_at))
                at = end_at
        return found

    def _make_span(self, use: TimeUse, start_at: float, end_at: float) -> Span:
        if use in _OF_NONE:  # even if ranks had not yet redone all that an incident lost; and a person costs a hold
            return Span(use=use, start_at=start_at, end_at=end_at)
        return Span(use=use, start_at=start_at, end_at=end_at, incident=self._incident, change=self._change)

    def _close_span(self, at: float) -> None:
        """Add the spans of what time is used for now (training, launching, ...), since the last one, up to `at`."""
        at = max(at, self._at)
        if at > self._at and self.phase in USES:
            self._spans += self._current_spans(at)
            self._at = at

    def _add_stall(self, since: float, until: float) -> None:
        self._close_span(since)
        if until > self._at:
            stall = self._make_span(TimeUse.STALL, self._at, until)
            self._spans.append(msgspec.structs.replace(stall, place=self._standstill.place))
            self._at = until

    def _end_failed_change(self, failed_at: float, at: float) -> None:
        """Charge the incident with the time since the planned restart failed, which was reported later, at `at`."""
        self._close_span(failed_at)
        if at > self._at:
            trouble = Span(use=TimeUse.DETECT, start_at=self._at, end_at=at, incident=len(self.incidents) + 1)
            self._spans, self._at = [*self._spans, trouble], at

    def _enter_phase(self, at: float, phase: Phase) -> None:
        if phase is Phase.TRAINING and self.progress:
            at = min(at, self.progress.first_at)  # heard later than it happened
        if phase is Phase.STOPPING and self.phase is Phase.PAUSING and self._change:  # its restart serves both
            self._incident, self._change = len(self.incidents) + 1, 0
            if self._cut:
                self._cut = self._cut[0], self._make_span(TimeUse.PAUSE, self._at, self._at)
        self._close_span(at)
        if self.phase is Phase.DONE:  # its nodes' time was over, and it goes on with others
            self._spans.append(self._make_span(TimeUse.WAIT, self._at, max(at, self._at)))
            self._at, self.finish = max(at, self._at), None
        if phase in (Phase.STOPPING, Phase.PAUSING):
            # An incident that has not come to a step goes on through a pause.
            mending = self._incident and self._redo_to is None
            ran = self.phase is Phase.STARTING and not self._stepped_ever and not (self._incident or self._change)
            stopping, self._redo_to = phase is Phase.STOPPING, None
            trouble = stopping or mending
            self._incident, self._change = (len(self.incidents) + 1, 0) if trouble else (0, len(self.changes) + 1)
            uses = (TimeUse.START_UP,) if ran else (*TRAINED, *ALONE) if self.phase is Phase.TRAINING else ()
            if self._spans and self._spans[-1].use in uses:
                use = TimeUse.DETECT if stopping else TimeUse.PAUSE
                self._cut = len(self._spans) - 1, self._make_span(use, self._at, self._at)
        if phase is Phase.LAUNCHING:
            self.generation += 1
            self.progress, self._parted, self._taken_over_at = None, False, None
        if phase is Phase.TRAINING:
            self.admitting = frozenset()
        if phase is Phase.ENDING:
            self._spans[-1:] = self._standstill.split_newest(self._spans[-1:])
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

    def _set_parted(self, parted: bool, at: float) -> None:
        """Record whether ranks have made the last step of their generation. A change ends the current span at `at`."""
        if parted is not self._parted:
            self._close_span(at)
            self._parted = parted

    def _on_progress(self, before: Progress | None, event: Progress) -> None:
        while self._redo_to is not None and event.step >= self._redo_to:
            self._close_span(event.reached_at(self._redo_to, before))
            self._redo_from(self._redo_to)
        self._set_parted(event.parted, max(event.at, event.last_at))
        if event.renumbers(before):
            self.best = -1
        if before is None:
            self._add_unheard(event)
        self.step, self.newest, self._stepped_in = event.step, event, self._release
        made = max(0, event.step - (before.step if before else event.first_step - 1))
        if before and made > 1e9 * max(1.0, event.at - before.at):  # some number their steps by samples or tokens
            return  # a slip of the script: nobody made these steps, and its next report has another number
        new = made if event.counted else min(made, max(0, event.step - self.best))
        if not event.counted:
            self.best = max(self.best, event.step)
        self._add_steps(self._release, new, made - new)
        self._owed.add_redone(event.step - made + 1, made - new)

    def _add_unheard(self, event: Progress) -> None:
        """Count steps that nobody reported: those between the furthest known step and a launch's first step."""
        alike = self.newest is not None and not event.counted and self.newest.numbered is event.numbered
        if alike and 0 <= self.best < event.first_step - 1:
            self._add_steps(self._stepped_in, event.first_step - 1 - self.best, 0)
            self.best = event.first_step - 1

    def _add_steps(self, release: int, new: int, redone: int) -> None:
        self._ran[release] = self._ran[release].add_steps(new, redone)

    def _on_recovery(self, record: Record | Change, whose: RedoneSteps) -> None:
        """End the training span of a finished stop at the last good step, and begin to count redone steps."""
        self._backdate_span(record)
        if incident_text.describe_unknown_resume(record) and not is_given_up(record):
            self._ran[self._release] = msgspec.structs.replace(self._ran[self._release], unsure=True)
        if self.phase is not Phase.TRAINING:
            return
        self._owed.add_restart(record, whose, self.best)
        self._redo_from(self.best if record.resumed_from is None else record.resumed_from)

    def _redo_from(self, step: int) -> None:
        """Charge the work after this step to the restart that lost it. If no restart has lost it, the work is new."""
        self._redo_to, whose = self._owed.find_debt(step) or (None, RedoneSteps())
        self._incident, self._change = whose.incident, whose.change

    def _backdate_span(self, record: Record | Change) -> None:
        """Move the end of the training span back from the alarm or the order to the last good step."""
        if self._cut is None or record.good_at > self._spans[self._cut[0]].end_at:
            return  # of a later generation, which a planned restart had started
        self._spans = self._spans_cut_at(record.good_at, ends=self.phase is Phase.ENDING and not is_given_up(record))
        self._cut = None
        if isinstance(record, Record) and record.stepped_at:
            self._spans = book_stall(self._spans, record, self._standstill.place)

    def _spans_cut_at(self, good_at: float, *, ends: bool = False) -> list[Span]:
        """Return the spans with time after `good_at` booked as lost. With `ends`, the job ends at its newest step."""
        if self._cut is None:
            return list(self._spans)
        index, instead = self._cut
        end_at = self._spans[index].end_at
        first = find_first_cut(self._spans, index, good_at)
        good_at = min(max(good_at, self._spans[first].start_at), end_at)
        kept = [span.clip_end(good_at) for span in self._spans[first : index + 1] if span.start_at < good_at]
        if ends and kept and kept[-1].use in TRAINED:
            kept[-1:] = split_end(kept[-1], max(self._good_at, self.newest.at if self.newest else 0.0))
        lost = msgspec.structs.replace(instead, start_at=good_at, end_at=end_at)
        return [*self._spans[:first], *kept, *([lost] if lost.seconds else []), *self._spans[index + 1 :]]


def fold_entries(entries: Iterable[Entry], now: float | None = None) -> Account:
    ledger = Ledger()
    for entry in entries:
        ledger.add(entry)
    return ledger.make_account(now)
