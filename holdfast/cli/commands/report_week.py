"""`holdfast report --week`: the last seven days of all runs of this host or of a database, as one summary."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from holdfast.cli.run_dirs import run_directory, run_journal, run_selection
from holdfast.cli.run_dirs.journal_database_connection import open_database
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_output import make_output
from holdfast.cli.terminal.quantity_text import counted_noun, duration_text, ettr_of
from holdfast.controller_interfaces import Journal
from holdfast.core.record.ledger import fold_entries
from holdfast.core.record.report_window import fold_since
from holdfast.core.record.week_summary import RunAccount, WeekSummary, summarize_runs
from holdfast.core.terminal_sanitizer import strip_tree
from holdfast.journal.journal_errors import JournalDamagedError, JournalError
from holdfast.model.decider_events import Ready
from holdfast.model.journal_entry import Entry

_WEEK_S = 7 * 86400.0
_WIDE = 80  # columns
_ROWS = 12  # of a table, the first
_clock = time.time
WeekTable = tuple[str, tuple[str, ...], list[tuple[str, ...]]]  # its title, its columns, its rows


def print_week(folders: list[str], url: str | None, *, as_json: bool, html: Path | None) -> None:
    """Print the summary of the last seven days, or write it to `html`. Raises UsageError or JournalError on failure."""
    if url and folders:
        raise UsageError("--journal names the runs of a database; name no folders beside it")
    until = _clock()
    since, unread = until - _WEEK_S, list[str]()
    found = _database_runs(url, since, unread) if url else _folder_runs(folders, since, unread)
    summary = msgspec.structs.replace(summarize_runs(found, since, until), unread=tuple(unread))
    if as_json:
        print(msgspec.json.encode(summary).decode())
        return
    shown = msgspec.convert(strip_tree(msgspec.to_builtins(summary)), WeekSummary)
    if html is None:
        console = make_output()
        console.print(render_week(shown), width=min(_WIDE, console.width))
        return
    from holdfast.cli.terminal.output_file import replace_file
    from holdfast.dash.week_page import write_week_page

    try:
        replace_file(html, write_week_page(*describe_week(shown), list_tables(shown)))
    except OSError as e:
        raise UsageError(f"cannot write {html}: {e.strerror}") from None
    print(f"holdfast report: wrote {html}; it names machines")


def _folder_runs(folders: list[str], since: float, unread: list[str]) -> Iterator[RunAccount]:
    """Yield the runs that were alive after `since`: those in `folders`, else all of this user on this host.
    For each run that cannot be read, add a sentence to `unread`."""
    for run_dir in _list_run_dirs(folders):
        with contextlib.suppress(OSError):
            if max(path.stat().st_mtime for path in run_dir.glob("journal.db*")) < since:
                continue  # so nothing in it is newer
        try:
            now = _clock() if run_directory.find_controller(run_dir) else None
            with contextlib.closing(run_journal.open_to_read(run_dir)) as journal:
                run = _account_for(run_directory.read_spec(run_dir).job.run_id, journal, since, now)
        except (JournalError, UsageError) as e:
            unread.append(f"{run_dir.name}: {e}")
            continue
        if run:
            yield run


def _list_run_dirs(folders: list[str]) -> Iterable[Path]:
    if not folders:
        return run_selection.known_runs()
    found: dict[Path, None] = {}
    for folder in map(Path, folders):
        here = [folder] if (folder / "run.json").exists() else sorted(path.parent for path in folder.glob("*/run.json"))
        if not here:
            raise UsageError(f"{folder} is no run directory, and none is in it")
        found |= dict.fromkeys(path.resolve() for path in here)
    return found


def _database_runs(url: str, since: float, unread: list[str]) -> Iterator[RunAccount]:
    """Yield the runs of a database that were alive after `since`. For each that is damaged, add a sentence to `unread`.
    Raises JournalError if the database itself cannot be read."""
    with open_database(url, "--journal ") as link:
        from holdfast.journal import postgres_lease, postgres_schema
        from holdfast.journal.postgres_journal import PostgresJournal

        postgres_schema.require_schema(link)
        known = postgres_lease.list_runs(link)
    for run in known:
        if run.alive_at and run.alive_at < since:
            continue
        with contextlib.closing(PostgresJournal(url, run.run_id)) as journal:
            try:
                found = _account_for(run.run_id, journal, since, _clock() if run.held else None)
            except JournalDamagedError as e:
                unread.append(f"{run.run_id}: {e}")
                continue
        if found:
            yield found


def _account_for(run_id: str, journal: Journal, since: float, now: float | None) -> RunAccount | None:
    """Return the RunAccount of a run from `since` on, folded from its journal; None if the run had ended before."""
    hosts: dict[str, str] = {}

    def read() -> Iterator[Entry]:
        for entry in journal.read():
            if isinstance(entry.event, Ready) and entry.event.host:
                hosts[entry.event.node] = entry.event.host
            yield entry

    account = fold_entries(read(), now)
    if account.end_at <= since:
        return None
    if account.start_at < since:
        account = fold_since(journal.read(), since, now)
    return RunAccount(run_id=run_id, account=account, hosts=hosts)


def describe_week(week: WeekSummary) -> tuple[str, tuple[str, ...]]:
    """Return the headline of a summary, and the sentences below it."""
    days = " to ".join(f"{datetime.fromtimestamp(at, UTC).astimezone():%d %b %H:%M}" for at in (week.since, week.until))
    runs, mttr = (
        counted_noun(len(week.runs), "run"),
        f", {week.mttr_s:.1f} s to recover on average" if week.mttr_s else "",
    )
    most = "at most " if week.at_most else ""
    said = [f"{days}: {runs}, {counted_noun(week.incidents, 'incident')}{mttr}"]
    if week.stepless_s:
        said.append(f"{duration_text(week.stepless_s)} are of runs in which no step was seen; the ETTR leaves them out")
    said += [f"left out: {why}" for why in week.unread]
    return ettr_of(week.job_s - week.stepless_s, week.ettr, most) if week.runs else "no run in seven days", tuple(said)


def list_tables(week: WeekSummary) -> list[WeekTable]:
    """Return the tables of a summary; those without rows are left out."""
    lost, ended = sum(week.lost_s.values()), sum(week.rungs.values())
    tables: list[WeekTable] = [
        (
            "Lost time by cause",
            ("cause", "lost ", "share "),
            [(cause, duration_text(s), f"{100 * s / lost:.0f} %") for cause, s in week.lost_s.items()],
        ),
        (
            "Incidents and changes by what ended them",
            ("rung", "count ", "share "),
            [(rung, str(count), f"{100 * count / ended:.0f} %") for rung, count in week.rungs.items()],
        ),
        ("Evictions by host", ("host", "evictions "), [(host, str(count)) for host, count in week.evicted.items()]),
        (
            "Releases",
            ("run", "release ", "from", "new steps ", "redone "),
            [
                (run.run_id, str(one.release), one.source, f"{one.steps:,}", f"{one.redone:,}")
                for run in week.runs
                for one in run.releases
                if len(run.releases) > 1 or one.release > 1
            ],
        ),
        (
            "Runs, those that lost most first",
            ("run", "time ", "ETTR ", "incidents ", "lost ", "code "),
            [
                (
                    run.run_id,
                    duration_text(run.job_s),
                    "not known" if run.ettr is None else f"{'at most ' if run.at_most else ''}{100 * run.ettr:.1f} %",
                    str(run.incidents),
                    duration_text(run.lost_s),
                    "" if run.code is None else str(run.code),
                )
                for run in week.runs
            ],
        ),
    ]
    return [table for table in tables if table[2]]


def render_week(week: WeekSummary) -> Group:
    headline, said = describe_week(week)
    parts: list[Text | Table] = [Text(headline, style="bold green"), *map(Text, said)]
    for title, columns, rows in list_tables(week):
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in columns:
            table.add_column(column.strip(), justify="right" if column.endswith(" ") else "left", overflow="fold")
        for row in rows[:_ROWS]:
            table.add_row(*row)
        parts += [
            Text(f"\n{title}", style="bold"),
            table,
            *([Text(f"and {more} more", style="dim")] if (more := len(rows) - _ROWS) > 0 else []),
        ]
    return Group(*parts)
