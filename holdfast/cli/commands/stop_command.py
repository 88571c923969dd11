"""`holdfast stop`: ends a job, with a grace period for its ranks or at once."""

import sys
import time
from pathlib import Path

from holdfast.cli.run_dirs import run_directory, run_liveness, run_selection
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.wire import run_and_node_specs
from holdfast.wire.controller_request import ControllerNotRunning
from holdfast.wire.run_and_node_specs import RunEnd

_STOPPED = 143  # exit code of a job that this ends; one that was already ending keeps its own
_GONE_S = 10.0  # a controller that crashed is back by then


def main(argv: list[str]) -> int:
    parser = CommandParser(prog="holdfast stop", description="Stop a job and everything it started.")
    run_selection.add_run_argument(parser, order=True)
    parser.add_argument("--now", action="store_true", help="without grace: SIGKILL at once")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it has ended")
    args = parser.parse_args(argv)
    try:
        run_dir = run_selection.run_to_change(args)
        said = run_dir / "said.log"
        shown = said.stat().st_size if said.exists() else 0
        order = {"verb": "stop", "code": _STOPPED, "now": args.now}
        ask_controller(run_dir, "/api/v1/orders", order)
    except (UsageError, ControllerNotRunning) as e:
        print(f"holdfast stop: {e}", file=sys.stderr)
        return 2
    if args.no_wait:
        print("stopping")
        return 0
    seen_at = time.monotonic()
    while not (run_dir / "exit.json").exists():
        time.sleep(0.1)
        shown = _show_said(said, shown)
        if run_directory.find_controller(run_dir):
            seen_at = time.monotonic()
        elif time.monotonic() > seen_at + _GONE_S:
            print(f"holdfast stop: the run in {run_dir} {run_liveness.ending_text(run_dir)}", file=sys.stderr)
            return 2
    _show_said(said, shown)
    ended = run_and_node_specs.read_json(run_dir / "exit.json", RunEnd)
    print("stopped" if ended.code == _STOPPED else f"the run has ended with code {ended.code}: {ended.reason}")
    return 0


def _show_said(said: Path, shown: int) -> int:
    """Show the lines of the run's console log from byte `shown` on; return the offset after them."""
    try:
        with said.open("rb") as file:
            file.seek(shown)
            new = file.read()
    except FileNotFoundError:
        return 0
    sys.stderr.write(new.decode(errors="replace"))
    sys.stderr.flush()
    return shown + len(new)
