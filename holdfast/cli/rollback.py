"""`holdfast rollback`: go back to an older release, by hand."""

import sys
import time
from pathlib import Path

from holdfast.cli import releases, rundir, runs
from holdfast.cli.api import ask
from holdfast.cli.flagtable import UsageError
from holdfast.cli.order import Gait, Unheard, give, patiently
from holdfast.cli.parsing import CommandParser
from holdfast.wire.controller_call import NotRunning, Refused

_LOOK_S = 0.1


def main(argv: list[str]) -> int:
    parser = CommandParser(prog="holdfast rollback", description="Go back to an older release, now.")
    parser.add_argument("release", nargs="?", type=int, default=0, metavar="REL", help="default: the one before")
    runs.add_run(parser, order=True, positional=False)
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it makes steps")
    args = parser.parse_args(argv)
    try:
        run_dir = runs.ordered(args)
        before = releases.ask_all(run_dir).running
        give(run_dir, {"verb": "rollback", "number": args.release})
        where = f"to release {args.release}" if args.release else "to the release before"
        print(f"holdfast rollback: release {before} is ended, and the job goes back {where}", flush=True)
        if not args.no_wait:
            print(f"holdfast rollback: {_wait(run_dir, before)}")
    except Refused as e:
        print(f"holdfast rollback: {e.why}", file=sys.stderr)
        return 2
    except (UsageError, NotRunning) as e:
        print(f"holdfast rollback: {e}", file=sys.stderr)
        return 2
    except Unheard as e:
        print(f"holdfast rollback: {e}", file=sys.stderr)
        return 1
    return 0


def _wait(run_dir: Path, before: int) -> str:
    """Until another release makes steps."""
    began, gait = time.monotonic(), Gait()
    while True:
        try:
            status = patiently(run_dir, lambda: ask(run_dir, "/api/v1/status"))
        except NotRunning:
            raise Unheard(f"the run in {run_dir} {rundir.ending(run_dir)}") from None
        if status["release"] != before and gait.goes_on(status):
            return f"release {status['release']} runs; it took {time.monotonic() - began:.1f} s"
        time.sleep(_LOOK_S)
