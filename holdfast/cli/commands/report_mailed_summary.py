"""What `holdfast report --html` shows where no script runs, as in a reader of mail: what `holdfast report` prints."""

from datetime import UTC, datetime

from rich.console import Group
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from holdfast.cli.terminal.quantity_text import duration_text
from holdfast.core.record.job_account import TimeUse
from holdfast.core.record.job_report import Report
from holdfast.dash.scriptless_html import PlainTable, write_sheets

_ROWS = 100  # of a table, the newest
_TITLES = {"#": "Incidents", "planned": "Planned restarts"}  # by a table's first column


def write_summary(run_id: str, report: Report, spent_s: dict[TimeUse, float], printed: Group) -> str:
    """Return HTML without a script. `printed` is the report as a terminal shows it, made of texts and of tables that
    may be constrained to a width; uses of time, `spent_s`, are no part of it."""
    said, tables = [_describe_period(report)], [_list_uses(spent_s)]
    for part in printed.renderables:
        if isinstance(part, Text):
            said += [part.plain] if part.plain else []
            continue
        assert isinstance(part, Constrain) and isinstance(part.renderable, Table), part
        table, more = _read_table(part.renderable)
        tables.append(table)
        said += [f"{table[0]}: {more} older ones are left out here"] if more else []
    return write_sheets(run_id, said, tables)


def _describe_period(report: Report) -> str:
    until_at = report.start_at + report.wall_s
    days = [datetime.fromtimestamp(at, UTC).astimezone() for at in (report.start_at, until_at)]
    return f"{days[0]:%d %b %Y %H:%M} to {days[1]:%d %b %H:%M} {days[1]:%Z}"


def _list_uses(spent_s: dict[TimeUse, float]) -> PlainTable:
    whole_s = sum(spent_s.values())
    rows = [(use.value, duration_text(s), f"{100 * s / whole_s:.1f} %") for use, s in spent_s.items()]
    return "Where the time went", ("use", "time ", "share "), rows


def _read_table(table: Table) -> tuple[PlainTable, int]:
    """Return a table's title, columns and newest rows, and how many older ones there are."""
    columns = [str(column.header) for column in table.columns]
    rows = [tuple(map(str, row)) for row in zip(*(column.cells for column in table.columns), strict=True)]
    return (_TITLES[columns[0]], columns, rows[-_ROWS:]), len(rows[:-_ROWS])
