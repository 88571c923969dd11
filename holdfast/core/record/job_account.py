"""The account of a job: how every second was used, with its incidents, planned restarts and releases."""

from enum import StrEnum

import msgspec

from holdfast.core.detect.slow import PresentSlowness
from holdfast.core.incident import incident_text
from holdfast.core.incident.cause_name import split_label
from holdfast.core.record.open_trouble import Standing
from holdfast.core.record.release_pace import ReleasePace
from holdfast.core.record.report_only_alarms import AlarmNotice, describe_slow
from holdfast.model.decider_events import SlowTime
from holdfast.model.incident_record import Change, Record, Remedy
from holdfast.model.job_phase import Phase
from holdfast.model.stored_checkpoint_report import StorageReport

NO_CONTROLLER = "no controller"  # the cause of time in which nobody could mend or end the job
START_AND_END = "start and end"  # the cause of time before the first step and after the last one
PLANNED = "planned restarts"  # the cause of what they cost
FROM_START = "the start of this run"  # from which steps are counted that the script does not tell
HOLDS = "holds by people"  # the cause of time for which a person held the job
HOUR_S = 3600.0  # the window of the sliding ETTR
UNSETTLED = "open incident"  # of what an incident has cost whose cause is not known yet


class TimeUse(StrEnum):
    """The use of a second of the job's time; only TRAIN is productive."""

    TRAIN = "train"
    REDO = "redo"
    DETECT = "detect"
    STOP = "stop"
    PROBE = "probe"
    LAUNCH = "launch"
    START_UP = "start-up"
    WAIT = "wait"
    PAUSE = "pause"  # ranks are being ended on purpose, for a release, a person, or to grow
    ASK = "ask"  # a person is asked whether to go on
    HOLD = "hold"  # a person wants no rank to run
    STALL = "stall"  # it stood, and went on by itself or was ended by a person
    END = "end"  # after the last step ranks save, evaluate or clean up
    UNWATCHED = "unwatched"  # there was no controller, and ranks made no step
    OVER = "over"  # the script had ended, and there was no controller to see it: no time of the job
    UNKNOWN = "unknown"  # there was no controller, and nobody said what ranks did
    RUN = "run"  # ranks ran in a job that has shown no step: what they did is not known


NOT_LOST = (TimeUse.TRAIN, TimeUse.RUN, TimeUse.UNKNOWN, TimeUse.OVER)  # made new steps, or nobody knows, or was over
# Of time that no incident or restart cost.
CAUSES = {TimeUse.STALL: "stall", TimeUse.UNWATCHED: NO_CONTROLLER, TimeUse.HOLD: HOLDS}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    use: TimeUse
    start_at: float
    end_at: float
    incident: int = 0  # 0: none
    change: int = 0  # of a planned restart
    place: str = ""  # of a stall: where ranks were in their code, in words

    @property
    def seconds(self) -> float:
        return self.end_at - self.start_at

    def clip_end(self, end_at: float) -> "Span":
        """Return the part of this span before `end_at`; an empty one if there is none."""
        return msgspec.structs.replace(self, end_at=max(self.start_at, min(self.end_at, end_at)))


class ReleaseRun(msgspec.Struct, frozen=True, kw_only=True):
    """How many generations and steps a job made under one release."""

    release: int
    source: str
    generations: int = 0
    steps: int = 0  # that nobody had made before
    redone: int = 0  # steps that had been made before
    unsure: bool = False  # it is not known from where a generation resumed, so that new steps may have been redone

    def add_steps(self, new: int, redone: int) -> "ReleaseRun":
        return msgspec.structs.replace(self, steps=self.steps + new, redone=self.redone + redone)


class RedoneSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that one incident or planned restart had lost, as far as they have been made again."""

    incident: int = 0  # its number; 0: it was planned
    change: int = 0
    steps: int = 0


class UnwatchedTime(msgspec.Struct, frozen=True, kw_only=True):
    """A time without a controller: from one controller's last sign of life until the next one took over."""

    since: float  # 0: not known
    until: float


class Account(msgspec.Struct, frozen=True, kw_only=True):
    start_at: float
    end_at: float
    spans: tuple[Span, ...]
    incidents: tuple[Record, ...]
    changes: tuple[Change, ...]
    ran: tuple[ReleaseRun, ...]
    redone: tuple[RedoneSteps, ...]
    unwatched: tuple[UnwatchedTime, ...]
    phase: Phase
    standing: Standing = Standing()
    generation: int
    step: int
    step_at: float = 0.0  # when every rank had made it, as far as the journal tells; 0: no step was seen
    stepped: bool = False  # whether a step was ever seen; without one nobody knows which time was productive
    since: str = ""  # what steps are counted from; "": they have the script's own numbers, or those of its optimizer
    code: int | None = None  # of a finished job
    ending: str = ""
    early_end: str = ""  # "stopped" or "ended" before its ranks had come to their end; "": it was not
    storage: StorageReport | None = None  # what was last written there; None: no node has told of any
    opinions: tuple[str, ...] = ()  # of language models and people, on incidents
    slow: tuple[AlarmNotice, ...] = ()  # for which no incident was opened
    slow_times: tuple[SlowTime, ...] = ()  # in which it trained more slowly than before, and what that cost
    losses: tuple[AlarmNotice, ...] = ()  # that were bad, and for which none was opened either; the first of many
    lost_standbys: tuple[str, ...] = ()  # which, and why
    paces: tuple[ReleasePace, ...] = ()  # of releases in steady training

    def describe_slow(self, generation: int, present: PresentSlowness) -> tuple[str, bool]:
        """Return in words which ranks were reported as slow in this generation, and whether they are so still."""
        told = [one for one in self.slow if one.generation == generation]
        return describe_slow(told, present, self.end_at)

    @property
    def wall_s(self) -> float:
        return self.end_at - self.start_at

    @property
    def job_s(self) -> float:
        """Return the wall time, less the time in which the job had ended and no controller was there to see it."""
        return self.wall_s - self.spent_s(TimeUse.OVER)

    def spent_s(self, use: TimeUse) -> float:
        return sum(s.seconds for s in self.spans if s.use is use)

    def redone_steps(self, *, incident: int = 0, change: int = 0) -> int:
        """Return how many steps were made again after this incident or planned restart."""
        return sum(one.steps for one in self.redone if (one.incident, one.change) == (incident, change))

    @property
    def ettr(self) -> float | None:
        """Return the productive share of the job's time; None if no step was ever seen. Time that may or may not have
        been productive is included, and `at_most` says so."""
        productive_s = self.spent_s(TimeUse.TRAIN) + self.spent_s(TimeUse.UNKNOWN)
        return productive_s / self.job_s if self.stepped and self.job_s > 0 else None

    @property
    def hour_ettr(self) -> float | None:
        """Return the ETTR of the job's last hour; None if the job is younger than that, or no step was ever seen."""
        end_at = next((span.start_at for span in self.spans if span.use is TimeUse.OVER), self.end_at)
        since = end_at - HOUR_S
        if not self.stepped or since < self.start_at:
            return None
        productive = (span for span in self.spans if span.use in (TimeUse.TRAIN, TimeUse.UNKNOWN))
        return sum(max(0.0, span.end_at - max(span.start_at, since)) for span in productive) / HOUR_S

    @property
    def at_most(self) -> str:
        """Return "at most " if the ETTR may be lower, else "". It may be lower if a resumed step is unknown, because
        redone work then counts as new. It may also be lower if it is unknown what ranks did while there was no
        controller."""
        if self.spent_s(TimeUse.UNKNOWN):
            return "at most "
        mended = (r for r in self.incidents if r.verdict.remedy is not Remedy.GIVE_UP)
        sure = not any(incident_text.describe_unknown_resume(r) for r in mended) and not any(
            incident_text.describe_unknown_resume(c) for c in self.changes
        )
        return "" if sure else "at most "

    @property
    def mttr_s(self) -> float | None:
        """Return the mean time of repaired incidents; None if there are none. Each counts as in its sentence: to the
        next step from the last good one, or from a fault long after that, without the time for which a person held the
        job."""
        times = [incident_text.recovery_s(r) for r in self.incidents if r.verdict.remedy is not Remedy.GIVE_UP]
        return sum(times) / len(times) if times else None

    def lost_s(self) -> dict[str, float]:
        """Return the seconds lost by cause, redone work included."""
        causes = {r.number: split_label(r)[0] for r in self.incidents}
        lost: dict[str, float] = {}
        for span in self.spans:
            if span.use not in NOT_LOST:
                beside = PLANNED if span.change else CAUSES.get(span.use, START_AND_END)
                cause = causes.get(span.incident, UNSETTLED) if span.incident else beside
                lost[cause] = lost.get(cause, 0.0) + span.seconds
        return lost
