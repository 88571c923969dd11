"""The account of a job since some instant, so that a report of that time adds up like a report of the whole job."""

from collections.abc import Iterable

import msgspec

from holdfast.core.record.job_account import Account, ReleaseRun, Span
from holdfast.core.record.ledger import Ledger
from holdfast.model.journal_entry import Entry


def fold_since(entries: Iterable[Entry], since: float, now: float | None = None) -> Account:
    """Return the account of the time since an instant. Of older incidents, only the cost since then counts."""
    ledger = Ledger()
    before: Account | None = None
    for entry in entries:
        if before is None and entry.at > since:
            before = ledger.make_account()
            ledger.paces.measure_anew()
        ledger.add(entry)
    return _clip_account(ledger.make_account(now), before or ledger.make_account(), since)


def _clip_account(account: Account, before: Account, since: float) -> Account:
    since = min(max(since, account.start_at), account.end_at)
    spans = [_clip_start(span, since) for span in account.spans if span.end_at > since]
    costly = {span.incident for span in spans}
    changes = [
        number
        for number, change in enumerate(account.changes, 1)
        if change.asked_at >= since or any(span.change == number for span in spans)
    ]
    place = {number: place for place, number in enumerate(changes, 1)} | {0: 0}
    # An open one has no record yet; it is the next.
    place |= {len(account.changes) + 1: len(changes) + 1}
    return msgspec.structs.replace(
        account,
        start_at=since,
        spans=tuple(msgspec.structs.replace(span, change=place[span.change]) for span in spans),
        incidents=tuple(r for r in account.incidents if r.alarm_at >= since or r.number in costly),
        changes=tuple(account.changes[number - 1] for number in changes),
        ran=_subtract_steps(account.ran, before.ran),
        redone=tuple(
            msgspec.structs.replace(one, change=place[one.change]) for one in account.redone if one.change in place
        ),
        unwatched=tuple(time for time in account.unwatched if time.until > since),
        opinions=account.opinions[len(before.opinions) :],
        slow=account.slow[len(before.slow) :],
        slow_times=tuple(time for time in account.slow_times if time.until > since),
        losses=account.losses[len(before.losses) :],
        lost_standbys=account.lost_standbys[len(before.lost_standbys) :],
    )


def _clip_start(span: Span, since: float) -> Span:
    return msgspec.structs.replace(span, start_at=max(span.start_at, since))


def _subtract_steps(ran: tuple[ReleaseRun, ...], before: tuple[ReleaseRun, ...]) -> tuple[ReleaseRun, ...]:
    known = {one.release: one for one in before}
    none = ReleaseRun(release=0, source="")
    since = []
    for one in ran:
        old = known.get(one.release, none)
        generations, steps, redone = one.generations - old.generations, one.steps - old.steps, one.redone - old.redone
        if generations or steps or redone:
            since.append(msgspec.structs.replace(one, generations=generations, steps=steps, redone=redone))
    return tuple(since)
