"""`holdfast stop`: end a job, with grace or without."""

import sys
import time

from holdfast.cli import rundir, runs
from holdfast.cli.api import ask
from holdfast.cli.flagtable import UsageError
from holdfast.cli.parsing import CommandParser
from holdfast.wire.controller_call import NotRunning

_GONE_S = 10.0  # a controller that crashed is back by then


def main(argv: list[str]) -> int:
    parser = CommandParser(prog="holdfast stop", description="Stop a job and everything it started.")
    runs.add_run(parser, order=True)
    parser.add_argument("--now", action="store_true", help="without grace: SIGKILL at once")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it has ended")
    args = parser.parse_args(argv)
    try:
        run_dir = runs.ordered(args)
        order = {"verb": "stop", "code": 143, "now": args.now}
        ask(run_dir, "/api/v1/orders", order)
    except (UsageError, NotRunning) as e:
        print(f"holdfast stop: {e}", file=sys.stderr)
        return 2
    if args.no_wait:
        print("stopping")
        return 0
    seen_at = time.monotonic()
    while not (run_dir / "exit.json").exists():
        time.sleep(0.1)
        if rundir.listening(run_dir):
            seen_at = time.monotonic()
        elif time.monotonic() > seen_at + _GONE_S:
            print(f"holdfast stop: the run in {run_dir} {rundir.ending(run_dir)}", file=sys.stderr)
            return 2
    print("stopped")
    return 0
