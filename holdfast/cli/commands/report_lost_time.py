"""The report's words for lost time: what each incident and planned restart has cost, causes, and stalls."""

from rich.text import Text

from holdfast.cli.terminal.quantity_text import clock_text, counted_noun, duration_text
from holdfast.core.incident.incident_text import (
    SHOWN_S,
    describe_stood,
    lost_steps,
    start_up_s,
    stop_phases_s,
    sum_held_s,
)
from holdfast.core.record.job_account import START_AND_END, Span, TimeUse
from holdfast.core.record.job_report import Report
from holdfast.core.record.lost_time_bill import Bill, Row
from holdfast.core.sum_preserving_rounding import share_tenths
from holdfast.model.decider_events import SlowTime
from holdfast.model.incident_record import Change, Record

_STALLS = 4  # that are told one by one, the longest
_ALIKE_S = 0.1  # a start-up whose phases miss more of it had several launches


def render_causes(bill: Bill) -> Text:
    lost = sorted(((seconds, cause) for cause, seconds in bill.causes.items() if seconds > 0), reverse=True)
    if not lost:
        return Text("")
    shares = ", ".join(f"{cause} {duration_text(seconds)}{_start_text(bill, cause)}" for seconds, cause in lost)
    return Text(f"lost {duration_text(bill.lost_s)}: {shares}")


def _start_text(bill: Bill, cause: str) -> str:
    """If the cause is "start and end", return in brackets how many seconds went into each use of time; else ""."""
    return f" ({row_text(bill.others[cause])})" if cause == START_AND_END else ""


def row_text(row: Row, record: Record | Change | None = None) -> str:
    """Return a row of the report as text: the seconds that went into each use of time. With `record`, the text also
    splits the seconds of stopping and of starting up into phases."""
    parts = {TimeUse.STOP: stop_phases_s(record), TimeUse.START_UP: start_up_s(record)} if record else {}
    hidden = {TimeUse.REDO} | ({TimeUse.PROBE} if row.get(TimeUse.PROBE) == 0.0 else set())
    hidden |= {TimeUse.STALL} if record else set()  # it was before
    said = {use: f"{use.value} {seconds:.1f}" for use, seconds in row.items() if use not in hidden}
    return ", ".join(f"{text}{_detail_text(row[use], parts.get(use, {}))}" for use, text in said.items())


def _detail_text(seconds: float, parts: dict[str, float]) -> str:
    if len(parts) < 2 or abs(sum(parts.values()) - seconds) >= _ALIKE_S:
        return ""
    return f" = {' + '.join(f'{name} {part_s:.1f}' for name, part_s in share_tenths(parts, seconds).items())}"


def stall_texts(report: Report) -> list[Text]:
    """Return sentences that say when and where the job stood still; if there are many stalls, only the longest."""
    stalls = sorted((span for span in report.spans if span.use is TimeUse.STALL), key=lambda span: -span.seconds)
    said = [
        f"no step from {clock_text(span.start_at)} to {clock_text(span.end_at)}{_stall_cause(span)}"
        for span in sorted(stalls[:_STALLS], key=lambda span: span.start_at)
    ]
    shorter = len(stalls) - len(said)
    return [Text(text) for text in (*said, *([f"and {counted_noun(shorter, 'shorter stall')}"] if shorter else []))]


def slow_texts(report: Report) -> list[Text]:
    """Return sentences on the times in which the job was slower than before, and what each cost; of many, the most
    costly."""
    costly = sorted(report.slow_times, key=lambda time: -time.cost_s)
    said = [_slow_text(time) for time in sorted(costly[:_STALLS], key=lambda time: time.since)]
    if rest := costly[_STALLS:]:
        said.append(f"and slow {len(rest)} times more, for {duration_text(sum(time.cost_s for time in rest))}")
    return [Text(text) for text in said]


def _slow_text(time: SlowTime) -> str:
    who = f", as others waited for {time.node}" if time.node else ""
    took = f"steps took {time.ratio:.1f} times as long as before{who}"
    span = f"{clock_text(time.since)} to {clock_text(time.until)}"
    return f"slow from {span}: {took}; this cost {duration_text(time.cost_s)}, which the ETTR counts as training"


def _stall_cause(span: Span) -> str:
    if span.incident:
        return f", when incident {span.incident} came{f': {span.place}' if span.place else ''}"
    return f": {span.place or 'nobody told why'}"


def lost_text(record: Record | Change, row: Row, redone: int | None) -> str:
    """Return the seconds that were lost: those without a step, and those in which lost steps were made again. Those
    before a fault are told apart, as on the console, and so is a person's hold."""
    redo_s, before_s = row.get(TimeUse.REDO, 0.0), row.get(TimeUse.STALL, 0.0)
    took = f" in {redo_s:.1f} s" if redo_s else ""
    shown = f" ({row_text(row, record)})" if row else ""
    lost = f"{sum(row.values()) - redo_s - before_s:.1f} s{shown}"
    if redo_s or before_s:
        what = f" since the fault{describe_stood(before_s)}" if before_s else " without a step"
        lost = f"{sum(row.values()):.1f} s: {lost}{what}"
    held = f", held for {held_s:.1f} s" if (held_s := sum_held_s(record)) >= SHOWN_S else ""
    return f"{lost}{_redone_text(redone, lost_steps(record), took)}{held}"


def _redone_text(redone: int | None, lost: int | None, took: str) -> str:
    """Return how many steps were redone, as text. If more steps were lost than redone, also say how many were lost."""
    if redone is None or lost is None:
        return f", steps redone{took}" if took else ""
    of = f" of {lost}" if redone < lost else ""
    return f", {redone}{of} {'step' if max(redone, lost) == 1 else 'steps'} redone{took}"
