"""The figures of a report, rounded to tenths of a second such that rows, causes and uses add up to the time lost."""

import msgspec

from holdfast.core.incident.cause_name import describe_sureness, split_label
from holdfast.core.record.job_account import CAUSES, NOT_LOST, PLANNED, START_AND_END, UNSETTLED, TimeUse
from holdfast.core.record.job_report import Report
from holdfast.core.sum_preserving_rounding import in_tenths, share_tenths

Row = dict[TimeUse, float]  # seconds by use, in the order in which they were first spent


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    incidents: dict[int, Row]  # what each has cost, redone work included, by its number
    changes: dict[int, Row]  # the same of planned restarts, by their place in the report, from 1
    others: dict[str, Row]  # what nobody of these has cost, by cause
    causes: dict[str, float]

    @property
    def lost_s(self) -> float:
        return in_tenths(sum(self.causes.values()))

    @property
    def uses(self) -> Row:
        """Return the seconds of each use, summed over all rows."""
        found: Row = {}
        for row in (*self.incidents.values(), *self.changes.values(), *self.others.values()):
            for use, seconds in row.items():
                found[use] = in_tenths(found.get(use, 0.0) + seconds)  # sums of tenths are not quite tenths
        return found


def draw_bill(report: Report) -> Bill:
    """Return the bill of a report. Each row is rounded once, and every total is the sum of the rounded rows."""
    incidents: dict[int, Row] = {}
    changes: dict[int, Row] = {}
    others: dict[str, Row] = {}
    for span in report.spans:
        if span.use in NOT_LOST:
            continue
        if span.incident:
            row = incidents.setdefault(span.incident, {})
        elif span.change:
            row = changes.setdefault(span.change, {})
        else:
            row = others.setdefault(CAUSES.get(span.use, START_AND_END), {})
        row[span.use] = row.get(span.use, 0.0) + span.seconds
    incidents = {number: _round_row(row) for number, row in incidents.items()}
    changes = {number: _round_row(row) for number, row in changes.items()}
    others = {cause: _round_row(row) for cause, row in others.items()}
    labels = {record.number: split_label(record) for record in report.incidents}
    sure = {cause: [percent for other, percent in labels.values() if other == cause] for cause, _ in labels.values()}
    known = {number: describe_sureness(cause, sure[cause]) for number, (cause, _) in labels.items()}
    costs = list(others.items())
    costs += [(known.get(number, UNSETTLED), row) for number, row in incidents.items()]
    costs += [(PLANNED, row) for row in changes.values()]
    causes: dict[str, float] = {}
    for cause, row in costs:
        causes[cause] = in_tenths(causes.get(cause, 0.0) + sum(row.values()))
    return Bill(incidents=incidents, changes=changes, others=others, causes=causes)


def _round_row(row: Row) -> Row:
    """Return the row with its seconds rounded to tenths. Redone work is rounded apart from the other uses, because the
    console shows an incident's cost without redone work."""
    rounded = share_tenths({use: seconds for use, seconds in row.items() if use is not TimeUse.REDO})
    return rounded | ({TimeUse.REDO: in_tenths(row[TimeUse.REDO])} if TimeUse.REDO in row else {})
