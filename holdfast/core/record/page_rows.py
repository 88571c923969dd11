"""Rows of the web page that are made from one record each: spans of time, incidents and planned restarts."""

import msgspec

from holdfast.core.incident.cause_name import record_label
from holdfast.core.incident.failure_sequence import describe_all_failures
from holdfast.core.incident.incident_text import describe_kept, lost_steps, phases_s
from holdfast.core.incident.node_swap_text import describe_evicted, staying_nodes
from holdfast.core.record.job_account import Span, TimeUse
from holdfast.core.record.lost_time_bill import Bill
from holdfast.core.sum_preserving_rounding import share_tenths
from holdfast.model.incident_record import Change, Record


class PageSpan(msgspec.Struct, frozen=True, array_like=True):
    use: str
    start_at: float
    end_at: float
    incident: int
    change: int


class PageIncident(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list of incidents, and the head of its story."""

    number: int
    label: str
    cause: str
    kind: str
    remedy: str
    why: str  # of the verdict
    guess: bool  # nodes went on evidence short of proof
    nodes: tuple[str, ...]  # evicted, or suspected
    ranks: tuple[int, ...]
    evicted: tuple[str, ...]
    admitted: tuple[str, ...]  # and not evicted again
    left: tuple[str, ...]  # the evicted nodes in clauses, with who wanted them gone
    good_at: float
    alarm_at: float
    resumed_at: float
    good_step: int
    resumed_from: int | None
    lost_s: float  # without a step, and for redone work
    redo_s: float  # of it, the latter
    lost_steps: int | None
    failures: int
    stayed: str  # how many ranks went on in their processes; "": none did
    short: str  # of how many nodes the job then used how many, if fewer with the same batch
    phases_s: dict[str, float]
    sentence: str


class PageChange(msgspec.Struct, frozen=True, kw_only=True):
    why: str
    stayed: str  # as of an incident
    short: str
    at: float
    lost_s: float
    release: int
    phases_s: dict[str, float]
    sentence: str


def show_span(span: Span) -> PageSpan:
    return PageSpan(span.use.value, span.start_at, span.end_at, span.incident, span.change)


def show_incident(record: Record, bill: Bill) -> PageIncident:
    row = bill.incidents.get(record.number, {})
    return PageIncident(
        number=record.number,
        label=record_label(record),
        cause=describe_all_failures(record),
        kind=record.kind,
        remedy=record.verdict.remedy.value,
        why=record.verdict.reason,
        guess=record.verdict.guess,
        nodes=record.evicted or record.suspects,
        ranks=record.ranks,
        evicted=record.evicted,
        admitted=staying_nodes(record),
        left=describe_evicted(record, first="evicted "),
        good_at=record.good_at,
        alarm_at=record.alarm_at,
        resumed_at=record.resumed_at,
        good_step=record.good_step,
        resumed_from=record.resumed_from,
        lost_s=sum(row.values()),
        redo_s=row.get(TimeUse.REDO, 0.0),
        lost_steps=lost_steps(record),
        failures=record.failures,
        stayed=describe_kept(record).removeprefix(", "),
        short=record.short,
        phases_s=share_tenths(phases_s(record)),
        sentence=record.sentence,
    )


def show_change(change: Change, bill: Bill, number: int) -> PageChange:
    return PageChange(
        why=change.why,
        stayed=describe_kept(change).removeprefix(", "),
        short=change.short,
        at=change.asked_at,
        lost_s=sum(bill.changes.get(number, {}).values()),
        release=change.release,
        phases_s=share_tenths(phases_s(change)),
        sentence=change.sentence,
    )
