"""`holdfast report`: what a job did and what that cost, from the journal alone, during the run or afterwards."""

import argparse
import contextlib
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Group
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from holdfast.cli.commands.report_lost_time import lost_text, render_causes, row_text, slow_texts, stall_texts
from holdfast.cli.commands.report_unfinished_job import incidents_said, opened_said, state_said
from holdfast.cli.run_dirs import run_directory, run_journal, run_liveness, run_selection
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.since_flag import parse_since
from holdfast.cli.terminal.command_output import make_output, table_width
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.output_file import replace_file
from holdfast.cli.terminal.quantity_text import (
    clock_text,
    counted_noun,
    duration_text,
    ettr_of,
    hour_ettr_of,
    no_step_said,
    step_said,
    storage_said,
)
from holdfast.core.decide.controller_takeover import lost_journal_sentence
from holdfast.core.decide.incident_course import ENDED_FOR_ROOM
from holdfast.core.incident.failure_sequence import describe_all_failures
from holdfast.core.incident.incident_text import (
    FAILED_START,
    describe_kept,
    describe_new_release,
    describe_step,
    is_fresh_start,
    why_from_zero,
)
from holdfast.core.incident.node_swap_text import describe_swap
from holdfast.core.record.job_account import TimeUse, UnwatchedTime
from holdfast.core.record.job_report import Report, report_of
from holdfast.core.record.ledger import fold_entries
from holdfast.core.record.lost_time_bill import Bill, draw_bill
from holdfast.core.record.release_history import new_and_redone
from holdfast.core.record.release_pace import describe_paces
from holdfast.core.record.report_comparison import ComparedJobs, compare_jobs
from holdfast.core.record.report_window import fold_since
from holdfast.core.record.solving_rungs import describe_rungs
from holdfast.core.terminal_sanitizer import plain_line, strip_controls, strip_tree
from holdfast.journal.journal_errors import JournalError
from holdfast.model.incident_record import Change, Record
from holdfast.model.job_phase import Phase

UNKNOWN_TIME = "what ranks did in the unknown time nobody has told; the ETTR counts it as productive"
_WEEK = "sum up the last seven days of all your runs here, or of the runs in these folders"
_BAR = 100  # characters
_START_SHARE = 0.01  # of the time: a start that took less is not worth a word
_LOSSES = 4  # bad ones that are told one by one, the first
_COLOURS = {
    TimeUse.TRAIN: "green",
    TimeUse.REDO: "magenta",
    TimeUse.DETECT: "red",
    TimeUse.STOP: "bright_red",
    TimeUse.LAUNCH: "yellow",
    TimeUse.START_UP: "cyan",
    TimeUse.PROBE: "bright_magenta",
    TimeUse.WAIT: "bright_black",
    TimeUse.PAUSE: "blue",
    TimeUse.ASK: "bright_blue",
    TimeUse.HOLD: "white",
    TimeUse.STALL: "red",
    TimeUse.END: "bright_yellow",
    TimeUse.UNWATCHED: "bright_black",
    TimeUse.OVER: "bright_black",
    TimeUse.UNKNOWN: "bright_white",
    TimeUse.RUN: "bright_green",
}
# Where there are no colours, as in a file or a mail.
_LETTERS = {
    TimeUse.TRAIN: "█",
    TimeUse.REDO: "r",
    TimeUse.DETECT: "?",
    TimeUse.STOP: "x",
    TimeUse.LAUNCH: "l",
    TimeUse.START_UP: "s",
    TimeUse.PROBE: "P",
    TimeUse.WAIT: ".",
    TimeUse.PAUSE: "p",
    TimeUse.ASK: "a",
    TimeUse.HOLD: "h",
    TimeUse.STALL: "!",
    TimeUse.END: "e",
    TimeUse.UNWATCHED: "~",
    TimeUse.OVER: " ",
    TimeUse.UNKNOWN: "-",
    TimeUse.RUN: "o",
}


def main(argv: list[str]) -> int:
    parser = CommandParser(prog="holdfast report", description="Show what a job did and what it cost.")
    run_selection.add_run_argument(parser)
    parser.add_argument("--since", metavar="WHEN", help="only the last 30m, 2h or 1d of it, or since 14:02 or a date")
    parser.add_argument("--compare", metavar="RUN", help="show another run beside it; --since is for both")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the web page of the run into one file, to mail"
    )
    parser.add_argument("--week", nargs="*", metavar="DIR", help=_WEEK)
    parser.add_argument("--journal", metavar="URL", help="with --week: the runs whose journals are in this database")
    args = parser.parse_args(argv)
    try:
        if args.week is not None or args.journal:
            return _print_week(args)
        run_dir = run_selection.run_to_read(args)
        if args.html:
            if args.since or args.compare or args.json:
                raise UsageError("--html writes the page of the whole run; leave out --since, --compare and --json")
            return _write_page(run_dir, args.html)
        report = load_report(run_dir, args.since)
        if args.compare is not None:
            other = run_selection.find(args.compare)
            return _print_comparison((run_dir, other), (report, load_report(other, args.since)), args.json)
    except (UsageError, JournalError) as e:
        print(f"holdfast report: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(msgspec.json.encode(report).decode())
    else:
        console = make_output()
        shown = strip_report(report)
        letters, fold = console.color_system is None, table_width(console)
        console.print(render_report(shown, min(_BAR, console.width), letters=letters, fold=fold))
    return 0


def _print_week(args: argparse.Namespace) -> int:
    from holdfast.cli.commands.report_week import print_week

    if args.week is None or args.since or args.compare or run_selection.named_run(args):
        raise UsageError(
            "--week sums up several runs: name folders after it, or a database with --journal, and no more"
        )
    if args.json and args.html:
        raise UsageError("--json prints and --html writes a file; leave out one of them")
    print_week(args.week, args.journal, as_json=args.json, html=args.html)
    return 0


def _print_comparison(runs: tuple[Path, Path], reports: tuple[Report, Report], as_json: bool) -> int:
    compared = compare_jobs(*reports)
    if as_json:
        told = {"runs": [str(run_dir) for run_dir in runs], "compared": compared, "reports": reports}
        print(msgspec.json.encode(told).decode())
        return 0
    from holdfast.cli.commands.report_two_runs import render_comparison

    shown = msgspec.convert(strip_tree(msgspec.to_builtins(compared)), ComparedJobs)
    make_output().print(render_comparison(shown, (strip_controls(runs[0].name), strip_controls(runs[1].name))))
    return 0


def _write_page(run_dir: Path, path: Path) -> int:
    """Write the web page of a run, as it is now, into one file."""
    from holdfast.cli.commands.report_mailed_summary import write_summary
    from holdfast.cli.page.page_sources import RunSource
    from holdfast.dash.page_feed import PageFeed
    from holdfast.dash.page_source import SourceError

    report = strip_report(load_report(run_dir))
    spent_s = spent_by_use(report, draw_bill(report))
    summary = write_summary(run_dir.name, report, spent_s, render_report(report, width=0))
    try:
        written = PageFeed(RunSource(run_dir)).render(summary)
    except (SourceError, OSError) as e:
        print(f"holdfast report: {e}", file=sys.stderr)
        return 2
    try:
        replace_file(path, written)
    except OSError as e:
        print(f"holdfast report: cannot write {path}: {e.strerror}", file=sys.stderr)
        return 2
    print(f"holdfast report: wrote {path}, {len(written.encode()) / 1e6:.1f} MB; it quotes logs and names machines")
    return 0


def strip_report(report: Report) -> Report:
    """Return a report without control characters in its texts."""
    return msgspec.convert(strip_tree(msgspec.to_builtins(report)), Report)


def load_report(run_dir: Path, since: str | None = None) -> Report:
    """Return the report of a run, or only of the time after `since`. Raise UsageError if `since` is after the run's
    end."""
    now = time.time() if run_directory.find_controller(run_dir) else None
    with contextlib.closing(run_journal.open_to_read(run_dir)) as journal:
        if journal.lost:
            print(f"holdfast report: {lost_journal_sentence(journal.lost)}", file=sys.stderr)
        if journal.doubt:
            print(f"holdfast report: {plain_line(journal.doubt)}; nobody can know", file=sys.stderr)
        account = fold_entries(journal.read(), now)
        since_at = parse_since(since, account) if since is not None else account.start_at
        if since_at > account.start_at:
            account = fold_since(journal.read(), since_at, now)
            report = msgspec.structs.replace(report_of(account), is_part=True)
        else:
            report = report_of(account)
    if now is not None or report.phase == Phase.DONE:
        return report
    return msgspec.structs.replace(report, absence=run_liveness.ending_text(run_dir))


def render_report(report: Report, width: int = _BAR, *, letters: bool = False, fold: int | None = None) -> Group:
    """Return the report as texts and tables. `width` is that of the bar of time; with 0, the uses of time are left
    out."""
    mttr = f", mean time to recover {report.mttr_s:.1f} s" if report.mttr_s is not None else ""
    planned = f", {counted_noun(len(report.changes), 'planned restart')}" if report.changes else ""
    head = Text.assemble(
        (ettr_of(report.job_s, report.ettr, report.at_most), "bold green"),
        (hour_ettr_of(report.hour_ettr, report.at_most), "bold green"),
        f"{_since_start(report)}: ",
        f"{incidents_said(report)}{mttr}{planned}; ",
        f"{_step_text(report)}, generation {report.generation}; {state_said(report)}",
    )
    bill = draw_bill(report)
    parts: list[Text | Constrain] = [
        Text(_part_text(report), style="dim"),
        head,
        *((_time_bar(report, width, letters), _spent_text(report, bill, letters)) if width else ()),
        render_causes(bill),
    ]
    parts.append(
        Text(
            storage_said(report.storage, unwatched=bool(report.absence)),
            style="bold" if report.storage and report.storage.missed else "dim",
        )
    )
    over = report.phase == Phase.DONE or bool(report.absence)
    early_end = report.early_end if report.ettr is None else ""
    parts += [Text(said)] if (said := no_step_said(report.spent_s[TimeUse.RUN], over=over, early_end=early_end)) else []
    parts += [*stall_texts(report), *slow_texts(report)]
    for what, told in (("slow", report.slow), ("loss", report.losses[:_LOSSES])):
        parts += [Text(f"{what}, told at {clock_text(one.at)}: {one.text}") for one in told]
    parts += [Text(f"loss, told {more} times more")] if (more := len(report.losses) - _LOSSES) > 0 else []
    parts += [Text(_unwatched_text(one)) for one in report.unwatched]
    parts += [Text(UNKNOWN_TIME)] if report.spent_s.get(TimeUse.UNKNOWN) else []
    parts.append(_standbys_text(report))
    parts += [_releases_text(report)] if len(report.releases) > 1 else []
    parts += [Text(pace, style="dim") for pace in describe_paces(report.paces)]
    parts.append(Text(describe_rungs(report.rungs), style="dim"))
    parts += [Constrain(_incidents_table(report, bill), fold)] if report.incidents or report.standing.incident else []
    parts += [Text(opinion) for opinion in report.opinions]
    parts += [Constrain(_changes_table(report, bill), fold)] if report.changes else []
    return Group(*(part for part in parts if part))


def _part_text(report: Report) -> str:
    if not report.is_part:
        return ""
    return f"since {clock_text(report.start_at)}, {duration_text(report.wall_s)}; what was before is left out"


def _step_text(report: Report) -> str:
    """Return the newest step in the journal as text. If the job is training, add the time of that step, since newer
    steps may have been made."""
    said = step_said(report.step, report.since)
    newer = report.step_at and report.phase == Phase.TRAINING and not report.absence
    return f"{said}, as of {clock_text(report.step_at)}" if newer else said


def _since_start(report: Report) -> str:
    """Return the ETTR since the first step as text; "" if the job took little time to reach that step."""
    uses = (TimeUse.TRAIN, TimeUse.UNKNOWN)  # those that the ETTR counts
    first_at = next((span.start_at for span in report.spans if span.use in uses), None)
    if first_at is None or report.is_part:
        return ""
    start_s = first_at - report.start_at
    if start_s < _START_SHARE * report.wall_s or report.job_s <= start_s:
        return ""
    since = sum(report.spent_s[use] for use in uses) / (report.job_s - start_s)
    return f" ({report.at_most}{100 * since:.1f} % after a start of {duration_text(start_s)})"


def _use_mark(use: TimeUse, letters: bool) -> str:
    return _LETTERS[use] if letters else "█"


def _time_bar(report: Report, width: int, letters: bool) -> Text:
    """Draw the wall time as one line of characters; each shows, by colour or letter, what took most of its interval."""
    if report.wall_s <= 0:
        return Text("")
    bar = Text()
    for cell in range(width):
        start = report.start_at + cell * report.wall_s / width
        end = start + report.wall_s / width
        shares: dict[TimeUse, float] = {}
        for span in report.spans:
            shared = min(end, span.end_at) - max(start, span.start_at)
            if shared > 0:
                shares[span.use] = shares.get(span.use, 0.0) + shared
        use = max(shares, key=lambda u: shares[u], default=TimeUse.WAIT)
        bar.append(_use_mark(use, letters), style=_COLOURS[use])
    return bar


def _spent_text(report: Report, bill: Bill, letters: bool) -> Text:
    text = Text()
    for use, seconds in spent_by_use(report, bill).items():
        text.append(f"{_use_mark(use, letters)} ", style=_COLOURS[use])
        text.append(f"{use.value} {duration_text(seconds)}   ")
    return text


def spent_by_use(report: Report, bill: Bill) -> dict[TimeUse, float]:
    """Return the seconds that went into each use of time, as the bill rounds them; without those that took none."""
    spent_s = {use: bill.uses.get(use, report.spent_s[use]) for use in TimeUse}
    return {use: seconds for use, seconds in spent_s.items() if seconds > 0}


def _unwatched_text(time: UnwatchedTime) -> str:
    if not time.since:
        return f"a new controller took over at {clock_text(time.until)}"
    lasted = duration_text(time.until - time.since)  # it gives a sign of life about once a second
    return (
        f"no controller from {clock_text(time.since)} to {clock_text(time.until)}: for {lasted} at most nobody watched"
    )


def _standbys_text(report: Report) -> Text:
    """Say how many nodes were evicted and admitted, how long the job waited for nodes, and which standbys it lost."""
    mended: tuple[Record | Change, ...] = (*report.incidents, *report.changes)
    out, new = sum(map(_count_evicted, mended)), sum(len(m.admitted) for m in mended)
    left = sum(len(m.evicted) for m in mended) - out
    waited_s = sum(s.seconds for s in report.spans if s.use is TimeUse.WAIT and (s.incident or s.change))
    gone = f"{out} evicted" + (f", {left} {ENDED_FOR_ROOM}" if left else "")
    swapped = [f"{gone}, {new} admitted, {duration_text(waited_s)} waited for nodes"] if out or left or new else []
    said = "; ".join([*swapped, *report.lost_standbys])
    return Text(f"nodes: {said}" if said else "", style="dim")


def _count_evicted(mended: Record | Change) -> int:
    """Return how many nodes were evicted, without those that had ended for want of room on a disk."""
    ended = mended.ordered.values() if isinstance(mended, Record) else ()
    return len(mended.evicted) - sum(how == ENDED_FOR_ROOM for how in ended)


def _releases_text(report: Report) -> Text:
    said = [
        f"{ran.release}{f' ({ran.source})' if ran.source else ''} {'at most ' if ran.unsure else ''}"
        + counted_noun(ran.steps, "new step")
        + (f" and {new_and_redone(ran)[1]} redone" if ran.redone or ran.unsure else "")
        for ran in report.releases
    ]
    return Text(f"releases: {', '.join(said)}", style="dim")


def _incidents_table(report: Report, bill: Bill) -> Table:
    table = _new_table("#", "at", "what happened", "why and what was done", "lost")
    redone = {restart.incident: restart.redone for restart in report.restarts}
    for record in report.incidents:
        swapped = describe_swap(record) + describe_kept(record) + (f"; {record.short}" if record.short else "")
        why = f"{record.verdict.reason}{swapped}{describe_new_release(record)}{_fresh_start_text(record)}"
        lost = lost_text(record, bill.incidents.get(record.number, {}), redone.get(record.number))
        happened = describe_all_failures(record, describe_step(record))
        table.add_row(str(record.number), clock_text(record.alarm_at), happened, why, lost)
    if opened := report.standing.incident:
        row = bill.incidents.get(opened.number, {})
        lost = f"{sum(row.values()):.1f} s so far{f' ({row_text(row)})' if row else ''}"
        table.add_row(str(opened.number), clock_text(opened.alarm_at), opened.cause, opened_said(opened), lost)
    return table


def _changes_table(report: Report, bill: Bill) -> Table:
    table = _new_table("planned", "at", "why", "release", "lost")
    planned = [restart.redone for restart in report.restarts if not restart.incident]
    for number, (change, redone) in enumerate(zip(report.changes, planned, strict=True), 1):
        took = lost_text(change, bill.changes.get(number, {}), redone)
        swapped = [f"{', '.join(change.evicted)} left"] if change.evicted else []
        swapped += [f"{', '.join(change.admitted)} came"] if change.admitted else []
        swapped += [FAILED_START] if change.failed else []
        why = "; ".join([change.why, *swapped]) + describe_new_release(change) + _fresh_start_text(change)
        table.add_row("", clock_text(change.asked_at), why, str(change.release), took)
    return table


def _new_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", title_justify="left")
    for column in columns:
        table.add_column(column, vertical="top")
    return table


def _fresh_start_text(record: Record | Change) -> str:
    return f"; {why_from_zero(record).removeprefix('but ')}" if is_fresh_start(record) else ""
