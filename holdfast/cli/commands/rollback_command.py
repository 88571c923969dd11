"""`holdfast rollback`: orders a job back to an older release."""

import argparse
import time
from pathlib import Path

from holdfast.cli.commands import releases_command
from holdfast.cli.commands.order_commands import Gait, OrderUnanswered, ask_patiently, exit_code_of, give_order
from holdfast.cli.run_dirs import run_liveness, run_selection
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.wire.controller_request import ControllerNotRunning

_LOOK_S = 0.1


def main(argv: list[str]) -> int:
    parser = CommandParser(prog="holdfast rollback", description="Go back to an older release, now.")
    parser.add_argument("release", nargs="?", default="0", metavar="REL", help="default: the one before")
    run_selection.add_run_argument(parser, order=True)
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it makes steps")
    args = parser.parse_args(argv)
    if not args.release.isdecimal():  # releases are numbers: this is the RUN
        args.run, args.release = args.run or args.release, "0"
    args.release = int(args.release)
    return exit_code_of("rollback", lambda: _roll_back(args))


def _roll_back(args: argparse.Namespace) -> int:
    run_dir = run_selection.run_to_change(args)
    before = releases_command.ask_releases(run_dir).running
    give_order(run_dir, {"verb": "rollback", "number": args.release})
    where = f"to release {args.release}" if args.release else "to the release before"
    print(f"holdfast rollback: ending release {before}; the job goes back {where}", flush=True)
    if not args.no_wait:
        print(f"holdfast rollback: {_await_release(run_dir, before)}")
    return 0


def _await_release(run_dir: Path, before: int) -> str:
    """Wait until the job trains with another release than `before`; return a sentence on how long that took."""
    began, gait = time.monotonic(), Gait()
    while True:
        try:
            status = ask_patiently(run_dir, lambda: ask_controller(run_dir, "/api/v1/status"))
        except ControllerNotRunning:
            raise OrderUnanswered(f"the run in {run_dir} {run_liveness.ending_text(run_dir)}") from None
        if status["release"] != before and gait.goes_on(status):
            return f"release {status['release']} runs; it took {time.monotonic() - began:.1f} s"
        time.sleep(_LOOK_S)
