"""`holdfast ls`: lists this user's runs on this host, or the runs of a database, with the state of each."""

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli.run_dirs import run_directory, run_liveness, run_selection
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.quantity_text import duration_text, phase_said, step_said
from holdfast.core.terminal_sanitizer import strip_controls
from holdfast.journal.journal_errors import JournalError
from holdfast.model.event import Phase
from holdfast.wire import run_and_node_specs
from holdfast.wire.controller_request import ControllerNotRunning
from holdfast.wire.run_and_node_specs import RunEnd

_ANSWER_S = 2.0  # one controller that does not answer must not hide the others
_NEWEST = 10
_OLD = ("token", "env.json", "run.json")  # the oldest of them is as old as a run whose run.json does not say


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    run_dir: str  # or the database that has its journal
    state: str  # the phase of one that is alive; "ended", "left" by its front, "unreadable"
    detail: str
    script: str
    started_at: float
    resumed_at: float = 0.0  # 0: it was not


def main(argv: list[str]) -> int:
    parser = CommandParser(prog="holdfast ls", description="Show your runs on this host, the newest last.")
    parser.add_argument("--all", action="store_true", help=f"not only live ones and the {_NEWEST} newest")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    parser.add_argument("--journal", metavar="URL", help="the runs whose journals are in this database, of all hosts")
    args = parser.parse_args(argv)
    try:
        rows, count = _rows_of(args.journal) if args.journal else _rows_here(args.all)
    except (UsageError, JournalError) as e:
        print(f"holdfast ls: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(msgspec.json.encode(rows).decode())
        return 0
    # Not a table: paths are long, and one that is folded cannot be copied.
    for row in rows:
        resumed = f", resumed {_ago_text(row.resumed_at)}" if row.resumed_at else ""
        when = f"started {_ago_text(row.started_at)}{resumed}"
        parts = (row.run_id, f"{row.state}{row.detail}", row.script, when, row.run_dir)
        print(strip_controls("  ".join(filter(None, parts))))
    if left_out := count - len(rows):
        print(f"and {left_out} older: holdfast ls --all")
    if not count:
        print(f"{run_directory.NO_RUN}; start one with holdfast run")
    return 0


def _rows_here(every: bool) -> tuple[list[RunRow], int]:
    """Return the rows of this host's newest and live runs, or of every one, and how many runs there are."""
    known = run_selection.known_runs()
    shown = [path for path in known if every or path in known[-_NEWEST:] or run_directory.find_controller(path)]
    return [_make_row(path) for path in shown], len(known)


def _rows_of(url: str) -> tuple[list[RunRow], int]:
    """Return the rows of all runs in a database, and how many there are."""
    try:
        from holdfast.journal import postgres_link, postgres_schema, run_lease
    except ModuleNotFoundError as e:
        raise UsageError(f"--journal needs {e.name}: pip install 'holdfast[postgres]'") from None
    if fault := postgres_link.why_no_url(url):
        raise UsageError(f"--journal {url} {fault}")
    link = postgres_link.PostgresLink(url)
    with contextlib.closing(link):
        postgres_schema.require_schema(link)
        found = run_lease.list_runs(link)
    rows = []
    for run in found:
        state, detail = run.phase.value, f", carried by {run.address or run.holder.partition(' ')[0]}"
        if run.phase is Phase.DONE:
            state, detail = "ended", ""
        elif not run.held:
            since = f" for {duration_text(max(0.0, time.time() - run.alive_at))}" if run.alive_at else ""
            state, detail = "left", f": no controller{since}; its command on a host of its --rdzv-endpoint takes it up"
        row = RunRow(run_id=run.run_id, run_dir=url, state=state, detail=detail, script="", started_at=run.began_at)
        rows.append(row)
    return rows, len(rows)


def _ago_text(at: float) -> str:
    return f"{duration_text(max(0.0, time.time() - at))} ago"


def _make_row(run_dir: Path) -> RunRow:
    started_at = min((run_dir / name).stat().st_mtime for name in _OLD if (run_dir / name).exists())
    try:
        run = run_directory.read_spec(run_dir)
    except UsageError as e:
        return RunRow(
            run_id=run_dir.name,
            run_dir=str(run_dir),
            state="unreadable",
            detail=f": {e}",
            script="",
            started_at=started_at,
        )
    state, detail = _run_state(run_dir)
    return RunRow(
        run_id=run.job.run_id,
        run_dir=str(run_dir),
        state=state,
        detail=detail,
        script=" ".join(run.entry.argv),
        started_at=run.started_at or started_at,
        resumed_at=run.resumed_at,
    )


def _run_state(run_dir: Path) -> tuple[str, str]:
    if run_directory.find_controller(run_dir):
        try:
            status: dict[str, Any] = ask_controller(run_dir, "/api/v1/status", wait_s=_ANSWER_S)
            return phase_said(status), f", {step_said(status['step'], status.get('since', ''))}"
        except (ControllerNotRunning, KeyError):
            return "alive", ", but its controller does not answer"
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return "ended", f" with code {run_and_node_specs.read_json(run_dir / 'exit.json', RunEnd).code}"
    if run_liveness.is_front_alive(run_dir):
        starting = run_liveness.is_starting(run_dir)
        return ("starting", "") if starting else ("alive", ", but it has no controller now")
    nodes = run_liveness.find_live_nodes(run_dir)
    if run_liveness.is_joined_node(run_dir):
        return "alive" if nodes else "left", ": a node of a job whose controller is on another host"
    resume = f"holdfast run --resume {run_dir}"
    if nodes:
        return "left", f": its front is gone, but its nodes still run; {resume} takes it up again"
    return "left", f": no controller; {resume} continues it, holdfast clean removes its remains"
