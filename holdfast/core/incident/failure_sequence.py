"""The failures of one incident in their order: what each was in words, and what their cost is booked as.

An incident lasts until the next step, so the job may fail several times in it, each time for several causes.
"""

from collections.abc import Sequence
from itertools import groupby

import msgspec

from holdfast.core.incident import cause_name, incident_text
from holdfast.core.rank_ranges import format_ranks
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.incident_record import Record

_SHOWN = 3  # of many, the first ones; the last one is shown besides


class JudgedFailure(msgspec.Struct, frozen=True):
    """One failure of an incident: its causes in words, and the alarms about them."""

    text: str
    causes: tuple[Alarm, ...]


def add_raisers(cause: Alarm, alike: Sequence[Alarm]) -> Alarm:
    """Return the alarm with a remark in its reason that other ranks raised the same error, if any did."""
    ranks = sorted({rank for alarm in (cause, *alike) for rank in alarm.ranks})
    if not alike:
        return cause
    remark = f"{len(ranks)} ranks raised it: {format_ranks(ranks)}"
    quoted = cause.reason.endswith(")")
    reason = f"{cause.reason[:-1]}; {remark})" if quoted else f"{cause.reason} ({remark})"
    return msgspec.structs.replace(cause, reason=reason)


def add_who_was_first(cause: Alarm, alarms: Sequence[Alarm]) -> Alarm:
    """Return the alarm of a bad loss with the remark that its ranks had it first, if others tell of it since a later
    step. Otherwise nobody knows: a sum over all ranks brings it to all of them in the same step."""
    if cause.kind is not Kind.LOSS or cause.not_after is None:
        return cause
    later = any(a.kind is Kind.LOSS and (a.not_after or 0) > cause.not_after for a in alarms)
    reason = cause.reason.replace("has a loss", "had a loss", 1).replace(" since step", " first, since step", 1)
    return msgspec.structs.replace(cause, reason=reason) if later else cause


def list_texts(failures: Sequence[JudgedFailure]) -> tuple[str, ...]:
    """Return what each failure was. Failures in a row with the same words are one text, with their number, unless all
    are the same. Return () if there is only one."""
    if len(failures) < 2:
        return ()
    runs = [(text, len(list(alike))) for text, alike in groupby(failure.text for failure in failures)]
    return tuple(text if 1 in (count, len(runs)) else f"{text} ({count} times)" for text, count in runs)


def join_labels(labels: Sequence[str], failures: int) -> str:
    """Return the name under which the cost of an incident is booked. `labels` are those of the causes of all its
    failures. Each cause is named once, and the name is as certain as the least certain of them."""
    parts = [cause_name.split_sureness(label) for label in labels]
    names = list(dict.fromkeys(name for name, _ in parts))
    many = f"{failures} failures: " if failures > 1 and len(names) > 1 else ""
    return cause_name.describe_sureness(f"{many}{incident_text.list_some(names)}", [min(sure for _, sure in parts)])


def describe_all_failures(record: Record, place: str = "") -> str:
    """Return what failed: the cause, or of several failures their number and what each was. `place` says where the
    first one happened, and follows it."""
    if record.failures < 2:
        return f"{record.cause}{place}"
    first, *others = record.causes or filter(None, (record.cause, record.last_cause))
    if not others:
        return f"{first}{place}, {record.failures} times without a step in between"
    if len(others) > _SHOWN:
        others = [*others[: _SHOWN - 1], "others", others[-1]]
    return f"{record.failures} failures: {'; then '.join((f'{first}{place}', *others))}"
