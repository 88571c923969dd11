"""`holdfast token`: makes and revokes tokens for people and tools, and makes tokens for nodes."""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from holdfast.cli.commands.order_commands import ask_patiently
from holdfast.cli.run_dirs import run_dir_secrets, run_selection
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.controller.access import user_tokens
from holdfast.controller.access.caller_admission import Right
from holdfast.controller.access.user_tokens import UserTokenError
from holdfast.core.terminal_sanitizer import strip_controls
from holdfast.wire.controller_request import ControllerNotRunning, RequestRefused

_RIGHTS = {right.name.lower(): right for right in Right}


def main(argv: list[str]) -> int:
    parser = CommandParser(
        prog="holdfast token",
        description="Make tokens for the ports of all your jobs. Commands on this host need none; pages, scrapers "
        "and people on other hosts do. Rights: view (look), operate (hold, resume, approve, evict, drain, stop), "
        "admin (update, rollback, node too). Running jobs notice a change within a second. A node token lets one host "
        "join one job, once.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    adding = verbs.add_parser("add", help="make a token; it is shown once")
    adding.add_argument("name", help="owner of the token, as the journal and audit.log show it")
    adding.add_argument("--right", choices=_RIGHTS, default="view", help="default: %(default)s")
    verbs.add_parser("ls", help="list names and rights")
    revoking = verbs.add_parser("revoke", help="revoke a token")
    revoking.add_argument("name")
    joining = verbs.add_parser("node", help="make a token that lets one host join a job, once; it is shown once")
    joining.add_argument("name", nargs="?", default="", help="name of the node (default: the host chooses one)")
    run_selection.add_run_argument(joining, order=True)
    joining.add_argument(
        "--within", type=float, default=3600.0, metavar="S", help="time for the host to join (default 3600)"
    )
    args = parser.parse_args(argv)
    try:
        return _run_verb(args)
    except RequestRefused as e:
        print(f"holdfast token: {e.why}", file=sys.stderr)
        return 2
    except (UserTokenError, UsageError, ControllerNotRunning, OSError) as e:
        print(f"holdfast token: {e}", file=sys.stderr)
        return 2


def _run_verb(args: argparse.Namespace) -> int:
    if args.verb == "node":
        run_dir, body = run_selection.run_to_change(args), {"node": args.name, "within_s": args.within}
        print(ask_patiently(run_dir, lambda: ask_controller(run_dir, "/api/v1/node-tokens", body))["token"])
        return 0
    path = run_dir_secrets.people_path()
    if args.verb == "add":
        print(user_tokens.add_token(path, args.name, _RIGHTS[args.right]))
    elif args.verb == "revoke":
        user_tokens.revoke_token(path, args.name)
        print(f"the token of {args.name} is revoked")
    else:
        table = Table("name", "right", box=None)
        for badge in user_tokens.read_tokens(path):
            table.add_row(strip_controls(badge.name), badge.right.name.lower())
        Console(markup=False, highlight=False).print(table)
    return 0
