"""`holdfast ls`: lists runs and their states: this user's runs on this host, or those of a database or a cluster."""

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli.commands.ls_elsewhere import CLUSTERS, RunRow, cluster_rows, database_rows
from holdfast.cli.run_dirs import run_directory, run_liveness, run_selection
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.quantity_text import duration_text, phase_said, step_said
from holdfast.core.terminal_sanitizer import strip_controls
from holdfast.journal.journal_errors import JournalError
from holdfast.logs.secret_masking import make_secret_masker
from holdfast.wire import run_and_node_specs
from holdfast.wire.controller_request import ControllerNotRunning
from holdfast.wire.run_and_node_specs import EntryPoint, RunEnd

_ANSWER_S = 2.0  # one controller that does not answer must not hide the others
_NEWEST = 10
_OLD = ("token", "env.json", "run.json")  # the oldest of them is as old as a run whose run.json does not say


def main(argv: list[str]) -> int:
    parser = CommandParser(prog="holdfast ls", description="Show your runs on this host, the newest last.")
    parser.add_argument("--all", action="store_true", help=f"not only live ones and the {_NEWEST} newest")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    parser.add_argument("--journal", metavar="URL", help="the runs whose journals are in this database, of all hosts")
    parser.add_argument("--fleet", choices=CLUSTERS, help="the runs that have nodes on this cluster")
    parser.add_argument("--kube-namespace", metavar="NAME", help="with --fleet kubernetes: of this namespace")
    args = parser.parse_args(argv)
    try:
        rows, count = _find_rows(args)
    except (UsageError, JournalError) as e:
        print(f"holdfast ls: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(msgspec.json.encode(rows).decode())
        return 0
    # Not a table: paths are long, and one that is folded cannot be copied.
    for row in rows:
        resumed = f", resumed {_ago_text(row.resumed_at)}" if row.resumed_at else ""
        when = f"started {_ago_text(row.started_at)}{resumed}" if row.started_at else "since when is not known"
        parts = (row.run_id, f"{row.state}{row.detail}", row.script, _owner_text(row.who), when, row.run_dir)
        print(strip_controls("  ".join(filter(None, parts))))
    if left_out := count - len(rows):
        print(f"and {left_out} older: holdfast ls --all")
    if not count:
        print(f"{run_directory.NO_RUN}{' there' if args.journal or args.fleet else ''}; start one with holdfast run")
    return 0


def _find_rows(args: argparse.Namespace) -> tuple[list[RunRow], int]:
    """Return the rows to show, and how many runs there are."""
    if args.journal and args.fleet:
        raise UsageError("--journal lists the runs of a database and --fleet those of a cluster; drop one of them")
    if args.kube_namespace and args.fleet != "kubernetes":
        raise UsageError("--kube-namespace goes with --fleet kubernetes")
    if not (args.journal or args.fleet):
        return _rows_here(args.all)
    rows = database_rows(args.journal) if args.journal else cluster_rows(args.fleet, args.kube_namespace)
    return rows, len(rows)


def _rows_here(every: bool) -> tuple[list[RunRow], int]:
    """Return the rows of the newest and the live runs (all runs if `every`), and how many runs this host knows."""
    run_directory.require_home()
    known = run_selection.known_runs()
    shown = [path for path in known if every or path in known[-_NEWEST:] or run_directory.find_controller(path)]
    return [_make_row(path) for path in shown], len(known)


def _owner_text(who: str) -> str:
    return f"of {who}" if who not in ("", run_directory.user_name()) else ""


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
    status = _ask_status(run_dir) if run_directory.find_controller(run_dir) else None
    state, detail = _run_state(run_dir) if status is None else _live_state(status)
    step = int(status["step"]) if status and not status.get("since") else -1  # else it is counted, and has no number
    return RunRow(
        run_id=run.job.run_id,
        run_dir=str(run_dir),
        state=state,
        detail=detail,
        script=_script_text(run.entry),
        started_at=run.started_at or started_at,
        resumed_at=run.resumed_at,
        nodes=len(status["nodes"]) if status and "nodes" in status else None,
        step=step if step >= 0 else None,
        who=run_directory.user_name(),
    )


def _script_text(entry: EntryPoint) -> str:
    """Return the script and its arguments as the user gave them, but for secrets; a path that begins with `..` is made
    absolute."""
    first, *more = entry.argv
    if not entry.module and entry.cwd and os.path.normpath(first).split(os.sep)[0] == os.pardir:
        first = os.path.normpath(os.path.join(entry.cwd, first))
    words = make_secret_masker().mask_argv((first, *more))
    return " ".join(("-m", *words) if entry.module else words)


def _ask_status(run_dir: Path) -> dict[str, Any]:
    """Return the status that a live controller reports about its run; empty if it does not answer."""
    with contextlib.suppress(ControllerNotRunning):
        status: dict[str, Any] = ask_controller(run_dir, "/api/v1/status", wait_s=_ANSWER_S)
        return status if {"phase", "step"} <= status.keys() else {}
    return {}


def _live_state(status: dict[str, Any]) -> tuple[str, str]:
    if not status:
        return "alive", ", but its controller does not answer"
    return phase_said(status), f", {step_said(status['step'], status.get('since', ''))}"


def _run_state(run_dir: Path) -> tuple[str, str]:
    """Return the state of a run that has no controller now."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return "ended", f" with code {run_and_node_specs.read_json(run_dir / 'exit.json', RunEnd).code}"
    if run_liveness.is_front_alive(run_dir):
        starting = run_liveness.is_starting(run_dir)
        return (
            ("starting", "")
            if starting
            else ("alive", f", but it has no controller now{run_liveness.full_disk_text(run_dir)}")
        )
    if address := run_liveness.controller_elsewhere(run_dir):
        return "elsewhere", f": it {run_liveness.elsewhere_text(run_dir, address)}"
    nodes = run_liveness.find_live_nodes(run_dir)
    if run_liveness.is_joined_node(run_dir):
        return "alive" if nodes else "left", ": a node of a job whose controller is on another host"
    resume = f"holdfast run --resume {run_dir}"
    if nodes:
        return "left", f": its front is gone, but its nodes still run; {resume} takes it up again"
    return "left", f": no controller; {resume} continues it, holdfast clean removes its remains"
