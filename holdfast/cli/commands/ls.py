"""`holdfast ls`: lists this user's runs on this host, with the state of each."""

import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli.run_dirs import run_directory, run_liveness, run_selection
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.quantity_text import duration_text, step_said
from holdfast.core.terminal_sanitizer import strip_controls
from holdfast.wire import run_and_node_specs
from holdfast.wire.controller_request import ControllerNotRunning
from holdfast.wire.run_and_node_specs import RunEnd

_ANSWER_S = 2.0  # one controller that does not answer must not hide the others
_NEWEST = 10
_OLD = ("token", "env.json", "run.json")  # the oldest of them is as old as a run whose run.json does not say


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    run_dir: str
    state: str  # the phase of one that is alive; "ended", "left" by its front, "unreadable"
    detail: str
    script: str
    started_at: float
    resumed_at: float = 0.0  # 0: it was not


def main(argv: list[str]) -> int:
    parser = CommandParser(prog="holdfast ls", description="Show your runs on this host, the newest last.")
    parser.add_argument("--all", action="store_true", help=f"not only live ones and the {_NEWEST} newest")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    args = parser.parse_args(argv)
    known = run_selection.known_runs()
    rows = [
        _make_row(path) for path in known if args.all or path in known[-_NEWEST:] or run_directory.find_controller(path)
    ]
    if args.json:
        print(msgspec.json.encode(rows).decode())
        return 0
    # Not a table: paths are long, and one that is folded cannot be copied.
    for row in rows:
        resumed = f", resumed {_ago_text(row.resumed_at)}" if row.resumed_at else ""
        when = f"started {_ago_text(row.started_at)}{resumed}"
        print(strip_controls(f"{row.run_id}  {row.state}{row.detail}  {row.script}  {when}  {row.run_dir}"))
    if left_out := len(known) - len(rows):
        print(f"and {left_out} older: holdfast ls --all")
    if not known:
        print(f"{run_directory.NO_RUN}; start one with holdfast run")
    return 0


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
            phase = "ending" if status.get("parted") else str(status["phase"])
            return phase, f", {step_said(status['step'], status.get('since', ''))}"
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
