"""`holdfast token`: names and rights for people and tools at the ports of this user's jobs, and tokens for nodes."""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from holdfast.cli import rundir, runs
from holdfast.cli.api import ask
from holdfast.cli.flagtable import UsageError
from holdfast.cli.order import patiently
from holdfast.cli.parsing import CommandParser
from holdfast.controller import badges
from holdfast.controller.badges import BadgeError
from holdfast.controller.door import Right
from holdfast.core.plain import plain
from holdfast.wire.controller_call import NotRunning, Refused

_RIGHTS = {right.name.lower(): right for right in Right}


def main(argv: list[str]) -> int:
    parser = CommandParser(
        prog="holdfast token",
        description="Tokens that open the ports of all your jobs: on this host commands need none, but pages, scrapers "
        "and people elsewhere do. Rights: view (look), operate (hold, resume, approve, evict, drain, stop), "
        "admin (update, rollback, node too). Changes reach jobs that run within a second. And tokens by which one host "
        "joins one job, once.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    adding = verbs.add_parser("add", help="make a token, which is shown once")
    adding.add_argument("name", help="whose it is: the journal and audit.log say so")
    adding.add_argument("--right", choices=_RIGHTS, default="view", help="default: %(default)s")
    verbs.add_parser("ls", help="list names and rights")
    revoking = verbs.add_parser("revoke", help="take one back")
    revoking.add_argument("name")
    joining = verbs.add_parser("node", help="make a token that lets one host join a job, once; it is shown once")
    joining.add_argument("name", nargs="?", default="", help="of the node; without it the host names itself")
    runs.add_run(joining, order=True, positional=False)
    joining.add_argument("--within", type=float, default=3600.0, metavar="S", help="it is to join so soon (3600)")
    args = parser.parse_args(argv)
    try:
        return _do(args)
    except Refused as e:
        print(f"holdfast token: {e.why}", file=sys.stderr)
        return 2
    except (BadgeError, UsageError, NotRunning, OSError) as e:
        print(f"holdfast token: {e}", file=sys.stderr)
        return 2


def _do(args: argparse.Namespace) -> int:
    if args.verb == "node":
        run_dir, body = runs.ordered(args), {"node": args.name, "within_s": args.within}
        print(patiently(run_dir, lambda: ask(run_dir, "/api/v1/node-tokens", body))["token"])
        return 0
    path = rundir.people()
    if args.verb == "add":
        print(badges.add(path, args.name, _RIGHTS[args.right]))
    elif args.verb == "revoke":
        badges.revoke(path, args.name)
        print(f"the token of {args.name} opens nothing any more")
    else:
        table = Table("name", "right", box=None)
        for badge in badges.read(path):
            table.add_row(plain(badge.name), badge.right.name.lower())
        Console(markup=False, highlight=False).print(table)
    return 0
