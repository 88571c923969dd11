"""The lease of a run in Postgres: which controller may write to its journal and act, and until when.

A writer is known by its holder (one `holdfast run`) and its epoch, and each write names both. The row of the run is
locked until the write is committed. So an older controller's write either comes before the takeover or fails. Only the
server's clock says whether a lease has expired.
"""

import os
from typing import NamedTuple

import msgspec

from holdfast.journal import postgres_schema
from holdfast.journal.entry_chain import START_BYTES, parse_row
from holdfast.journal.journal_errors import JournalError
from holdfast.journal.postgres_link import PostgresLink
from holdfast.model.action import Launch
from holdfast.model.decider_events import Progress
from holdfast.model.job_phase import Phase

LEASE_S = 5.0  # without a renewal for this long, another controller may take over
RENEW_S = 1.0
MARGIN_S = 1.0  # its holder stops so long before that: the server's clock and ours run at different speeds
START_S = 30.0  # for a `holdfast run` that has claimed a run to start its controller
# A run that is not there yet is made; one that others hold is left alone, and no row comes back.
_CLAIM = """
insert into holdfast.run as run (run_id, start, chain, epoch, holder, address, expires_at)
values (%(run)s, %(start)s, %(start)s, %(epochs)s, %(holder)s, %(address)s,
    clock_timestamp() + %(for)s * interval '1 second')
on conflict (run_id) do update
set holder = excluded.holder, address = excluded.address, expires_at = excluded.expires_at,
    epoch = run.epoch + %(epochs)s
where run.holder = excluded.holder or (run.expires_at <= clock_timestamp() and (run.phase <> 'done' or %(ended)s))
returning 1
"""
_LOOK = """
select run_id, start, epoch, holder, address, seq, chain, phase, expires_at > clock_timestamp(),
    coalesce(extract(epoch from alive_at), 0)::float8, extract(epoch from began_at)::float8
from holdfast.run
"""


_GLANCED = 200  # entries; a job that trains writes its step every few seconds
_NEWEST = """
select seq, at, event, decision, epoch, chain from holdfast.entry
where run_id = %(run)s order by seq desc limit %(count)s
"""


class RunGlance(NamedTuple):
    """A run's step and number of nodes; None where its newest entries do not tell."""

    step: int | None = None
    nodes: int | None = None


class LeasedRun(msgspec.Struct, frozen=True, array_like=True):
    """A run in Postgres: its lease and its newest entry."""

    run_id: str
    start: bytes
    epoch: int
    holder: str
    address: str
    seq: int
    chain: bytes
    phase: Phase
    held: bool  # its lease has not expired
    alive_at: float  # the last sign of life of a controller, by the server's clock; 0: there was none
    began_at: float


def look_at_run(link: PostgresLink, run_id: str) -> LeasedRun | None:
    found = link.execute(f"{_LOOK} where run_id = %(run)s", {"run": run_id})
    return _parse_row(found[0]) if found else None


def list_runs(link: PostgresLink) -> list[LeasedRun]:
    """Return all runs, oldest first."""
    return [_parse_row(values) for values in link.execute(f"{_LOOK} order by began_at, run_id")]


def glance_at_run(link: PostgresLink, run_id: str) -> RunGlance:
    """Return a run's step and number of nodes from its newest entries, without rebuilding its decider."""
    step = nodes = None
    for values in link.execute(_NEWEST, {"run": run_id, "count": _GLANCED}):
        try:
            row = parse_row(values)
            event, decision = (row.entry.event, row.entry.decision) if row else (None, None)
        except (msgspec.DecodeError, UnicodeDecodeError):  # damaged, or of a newer holdfast: others tell more
            continue
        if step is None and isinstance(event, Progress):
            step = event.step
        for action in decision.actions if decision and nodes is None else ():
            nodes = len(action.seats) if isinstance(action, Launch) else nodes
    return RunGlance(step, nodes)


def forget_run(link: PostgresLink, run_id: str) -> None:
    """Delete a run that has ended or has had no controller for a day. Raise JournalError for any other run."""
    postgres_schema.require_schema(link)
    gone = "run_id = %(run)s and (phase = 'done' or expires_at < clock_timestamp() - interval '1 day')"
    if not link.execute(f"delete from holdfast.run where {gone} returning 1", {"run": run_id}):
        known = look_at_run(link, run_id)
        raise JournalError(f"run {run_id} has not ended" if known else f"{link.url} has no run {run_id}")


def claim_run(link: PostgresLink, run_id: str, holder: str, address: str, for_s: float, *, ended: bool = False) -> bool:
    """Take a run's lease for a controller about to start, so that older ones cannot write. Return False if another
    holds it. A run that does not exist is created. A run that has ended is claimed only with `ended`, to continue
    it."""
    postgres_schema.prepare_schema(link)
    return _claim(link, run_id, holder, address=address, for_s=for_s, epochs=0, ended=ended)


def begin_epoch(link: PostgresLink, run_id: str, holder: str, address: str, for_s: float) -> LeasedRun | None:
    """Take or keep the lease and move on to the next epoch. Return None if another controller has the lease."""
    postgres_schema.prepare_schema(link)
    if not _claim(link, run_id, holder, address=address, for_s=for_s, epochs=1):
        return None
    found = look_at_run(link, run_id)
    return found if found and found.holder == holder else None


def _claim(
    link: PostgresLink, run_id: str, holder: str, *, address: str, for_s: float, epochs: int, ended: bool = False
) -> bool:
    values = {"run": run_id, "start": os.urandom(START_BYTES), "holder": holder, "address": address, "ended": ended}
    return bool(link.execute(_CLAIM, {**values, "for": for_s, "epochs": epochs}))


def _parse_row(values: tuple[object, ...]) -> LeasedRun:
    try:
        return msgspec.convert(values, LeasedRun)
    except msgspec.ValidationError as e:
        raise JournalError(f"the row of run {values[0]} is damaged: {e}") from None
