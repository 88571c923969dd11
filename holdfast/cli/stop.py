"""`holdfast stop`: end a job, with grace or without."""

import argparse
import getpass
import sys
import time

from holdfast.cli import rundir
from holdfast.cli.api import NotRunning, ask
from holdfast.cli.flagtable import UsageError


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="holdfast stop", description="Stop a job and everything it started.")
    parser.add_argument("run", nargs="?", help="run directory or id (default: the newest run)")
    parser.add_argument("--now", action="store_true", help="without grace: SIGKILL at once")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it has ended")
    args = parser.parse_args(argv)
    try:
        run_dir = rundir.find(args.run)
        order = {"verb": "stop", "who": f"{getpass.getuser()} (holdfast stop)", "code": 143, "now": args.now}
        ask(run_dir, "/api/v1/orders", order)
    except (UsageError, NotRunning) as e:
        print(f"holdfast stop: {e}", file=sys.stderr)
        return 2
    while not args.no_wait and rundir.listening(run_dir):
        time.sleep(0.1)
    print("stopped" if not args.no_wait else "stopping")
    return 0
