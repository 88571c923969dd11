"""The figures of a report, rounded to tenths of a second such that rows, causes and uses add up to the time lost."""

import msgspec

from holdfast.core.record.job_account import CAUSES, NOT_LOST, PLANNED, START_AND_END, UNSETTLED, TimeUse
from holdfast.core.record.job_report import Report
from holdfast.core.sum_preserving_rounding import in_tenths, share_tenths


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    incidents: dict[int, float]  # what each has cost, redone work included, by its number
    changes: dict[int, float]  # the same of planned restarts, by their place in the report, from 1
    causes: dict[str, float]
    uses: dict[TimeUse, float]  # of the time that was not productive

    @property
    def lost_s(self) -> float:
        return in_tenths(sum(self.causes.values()))


def draw_bill(report: Report) -> Bill:
    """Return the bill of a report. Each row is rounded once, and every total is the sum of the rounded rows."""
    incidents: dict[int, float] = {}
    changes: dict[int, float] = {}
    causes: dict[str, float] = {}
    uses: dict[TimeUse, float] = {}
    for span in report.spans:
        if span.use in NOT_LOST:
            continue
        uses[span.use] = uses.get(span.use, 0.0) + span.seconds
        if span.incident:
            incidents[span.incident] = incidents.get(span.incident, 0.0) + span.seconds
        elif span.change:
            changes[span.change] = changes.get(span.change, 0.0) + span.seconds
        else:
            cause = CAUSES.get(span.use, START_AND_END)
            causes[cause] = causes.get(cause, 0.0) + span.seconds
    known = {record.number: record.klass or record.kind for record in report.incidents}
    incidents = {number: in_tenths(seconds) for number, seconds in incidents.items()}
    changes = {number: in_tenths(seconds) for number, seconds in changes.items()}
    causes = {cause: in_tenths(seconds) for cause, seconds in causes.items()}
    for number, seconds in incidents.items():
        cause = known.get(number, UNSETTLED)
        causes[cause] = causes.get(cause, 0.0) + seconds
    if changes:
        causes[PLANNED] = sum(changes.values())
    causes = {cause: in_tenths(seconds) for cause, seconds in causes.items()}  # sums of tenths are not quite tenths
    bill = Bill(incidents=incidents, changes=changes, causes=causes, uses={})
    return msgspec.structs.replace(bill, uses=share_tenths(uses, bill.lost_s))
