"""Several runs over the same days as one value: their ETTR, what they lost, what failed, who was evicted, releases."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from holdfast.core.incident.incident_text import recovery_s
from holdfast.core.record.job_account import Account, ReleaseRun
from holdfast.core.record.solving_rungs import count_rungs
from holdfast.model.incident_record import Change, Record, Remedy


class RunAccount(msgspec.Struct, frozen=True, kw_only=True):
    """One run's account, cut to the days of the summary."""

    run_id: str
    account: Account
    hosts: dict[str, str] = {}  # of its nodes, as far as these told


class SummarizedRun(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    job_s: float
    ettr: float | None  # None: no step was seen
    at_most: bool  # the true ETTR may be lower
    lost_s: float
    incidents: int
    code: int | None  # None: it has not ended, as far as its journal goes
    releases: tuple[ReleaseRun, ...]


class WeekSummary(msgspec.Struct, frozen=True, kw_only=True):
    since: float
    until: float
    runs: tuple[SummarizedRun, ...]  # those that lost most first
    job_s: float
    ettr: float | None  # of all runs in which a step was seen, by their time; None: there is none
    at_most: bool
    stepless_s: float  # the time of the other runs, which the ETTR leaves out
    mttr_s: float | None
    incidents: int
    lost_s: dict[str, float]  # by cause, the most first
    rungs: dict[str, int]  # incidents and changes of code by what ended them, the most first
    evicted: dict[str, int]  # evictions by host, or by node where no host was told; the most first
    rollbacks: int
    unread: tuple[str, ...] = ()  # runs that are left out, each with the reason


def summarize_runs(runs: Iterable[RunAccount], since: float, until: float) -> WeekSummary:
    found = list(runs)
    accounts = [run.account for run in found]
    incidents = [record for account in accounts for record in account.incidents]
    changes = [change for account in accounts for change in account.changes]
    stepping = [account for account in accounts if account.ettr is not None]
    stepping_s = sum(account.job_s for account in stepping)
    good_s = sum(account.job_s * account.ettr for account in stepping if account.ettr is not None)
    repairs_s = [recovery_s(r) for r in incidents if r.verdict.remedy is not Remedy.GIVE_UP]
    lost, evicted = Counter[str](), Counter[str]()
    for run in found:
        lost.update(run.account.lost_s())
        mended: tuple[Record | Change, ...] = (*run.account.incidents, *run.account.changes)
        evicted.update(run.hosts.get(node) or node for one in mended for node in one.evicted)
    return WeekSummary(
        since=since,
        until=until,
        runs=tuple(sorted(map(_summarize_run, found), key=lambda run: (-run.lost_s, run.run_id))),
        job_s=sum(account.job_s for account in accounts),
        ettr=good_s / stepping_s if stepping_s > 0 else None,
        at_most=any(account.at_most for account in stepping),
        stepless_s=sum(account.job_s for account in accounts if account.ettr is None),
        mttr_s=sum(repairs_s) / len(repairs_s) if repairs_s else None,
        incidents=len(incidents),
        lost_s={cause: seconds for cause, seconds in lost.most_common() if seconds > 0},
        rungs=count_rungs(incidents, changes),
        evicted=dict(evicted.most_common()),
        rollbacks=sum(1 for record in incidents if record.rolled_back),
    )


def _summarize_run(run: RunAccount) -> SummarizedRun:
    account = run.account
    return SummarizedRun(
        run_id=run.run_id,
        job_s=account.job_s,
        ettr=account.ettr,
        at_most=bool(account.at_most),
        lost_s=sum(account.lost_s().values()),
        incidents=len(account.incidents),
        code=account.code,
        releases=account.ran,
    )
