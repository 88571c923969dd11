"""The report of a job as one value, from which the printed report, the API and the metrics all take their figures."""

import msgspec

from holdfast.core.incident.incident_text import lost_steps, phases_s, recovery_s
from holdfast.core.record.job_account import Account, ReleaseRun, Span, TimeUse, UnwatchedTime
from holdfast.core.record.open_trouble import Standing
from holdfast.core.record.release_pace import ReleasePace
from holdfast.core.record.report_only_alarms import AlarmNotice
from holdfast.core.record.solving_rungs import count_rungs
from holdfast.model.decider_events import SlowTime
from holdfast.model.incident_record import Change, Record, Remedy
from holdfast.model.stored_checkpoint_report import StorageReport


class RestartCost(msgspec.Struct, frozen=True, kw_only=True):
    """The time from the last good step, or from a fault long after it, to the next step, and how it divides into
    phases. For how long a person held the job is among the phases, but is no part of what was lost."""

    incident: int  # its number; 0: it was planned
    at: float  # when ranks were told to stop
    lost_s: float
    phases_s: dict[str, float]
    redone: int | None = None  # steps made again so far; None: not known


class Report(msgspec.Struct, frozen=True, kw_only=True):
    phase: str
    standing: Standing = Standing()  # what it waits for, and the open incident
    code: int | None
    ending: str
    early_end: str = ""  # "stopped" or "ended" before its ranks had come to their end; "": it was not
    storage: StorageReport | None = None  # what was last written there; None: no node has told of any
    absence: str = ""  # in words: why no controller runs the job, though it has not ended; "": one does, or it has
    generation: int
    step: int
    step_at: float = 0.0  # when it was made: while a job trains, its journal is told of steps every few seconds
    since: str = ""  # what steps are counted from; "": they have numbers of their own
    start_at: float
    is_part: bool = False  # what was before `start_at` is left out
    wall_s: float
    job_s: float  # of it, without the time in which the job was over and nobody saw it
    ettr: float | None  # None: no step was ever seen, so it is not known
    hour_ettr: float | None = None  # of the last hour; None: there was none yet
    at_most: str
    mttr_s: float | None
    spent_s: dict[str, float]  # by use
    lost_s: dict[str, float]  # by cause
    incidents: tuple[Record, ...]
    changes: tuple[Change, ...]  # planned restarts
    restarts: tuple[RestartCost, ...]  # of both kinds, by time
    releases: tuple[ReleaseRun, ...]
    spans: tuple[Span, ...]
    unwatched: tuple[UnwatchedTime, ...] = ()
    opinions: tuple[str, ...] = ()
    slow: tuple[AlarmNotice, ...] = ()  # for which no incident was opened
    slow_times: tuple[SlowTime, ...] = ()  # in which it trained more slowly than before, and what that cost
    losses: tuple[AlarmNotice, ...] = ()  # that were bad, and for which none was opened either; the first of many
    lost_standbys: tuple[str, ...] = ()  # which, and why
    paces: tuple[ReleasePace, ...] = ()  # of releases in steady training
    rungs: dict[str, int] = {}  # incidents and changes of code by what ended them


def report_of(account: Account) -> Report:
    return Report(
        phase=account.phase,
        standing=account.standing,
        code=account.code,
        ending=account.ending,
        early_end=account.early_end,
        storage=account.storage,
        generation=account.generation,
        step=account.step,
        step_at=account.step_at,
        since=account.since,
        start_at=account.start_at,
        wall_s=account.wall_s,
        job_s=account.job_s,
        ettr=account.ettr,
        hour_ettr=account.hour_ettr,
        at_most=account.at_most,
        mttr_s=account.mttr_s,
        spent_s={use.value: account.spent_s(use) for use in TimeUse},
        lost_s=account.lost_s(),
        incidents=account.incidents,
        changes=account.changes,
        restarts=_restart_costs(account),
        releases=account.ran,
        spans=account.spans,
        unwatched=account.unwatched,
        opinions=account.opinions,
        slow=account.slow,
        slow_times=account.slow_times,
        losses=account.losses,
        lost_standbys=account.lost_standbys,
        paces=account.paces,
        rungs=count_rungs(account.incidents, account.changes),
    )


def _restart_costs(account: Account) -> tuple[RestartCost, ...]:
    mended = [r for r in account.incidents if r.verdict.remedy is not Remedy.GIVE_UP]
    found = [_restart_cost(r, r.alarm_at, r.number, account.redone_steps(incident=r.number)) for r in mended] + [
        _restart_cost(c, c.asked_at, 0, account.redone_steps(change=n)) for n, c in enumerate(account.changes, 1)
    ]
    return tuple(sorted(found, key=lambda restart: restart.at))


def _restart_cost(record: Record | Change, at: float, incident: int, redone: int) -> RestartCost:
    return RestartCost(
        incident=incident,
        at=at,
        lost_s=recovery_s(record),
        phases_s=phases_s(record),
        redone=None if lost_steps(record) is None else redone,
    )
