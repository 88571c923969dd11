"""`holdfast blocked`: lists the hosts that jobs refuse, lifts a block, or adds one."""

import argparse
import sys
import time
from datetime import UTC, datetime

import msgspec

from holdfast.cli.run_dirs import journal_database_connection, run_directory
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.controller.access.block_list_file import BlockListError, BlockListFile, Entries, SharedBlockList
from holdfast.core.membership.host_blocking import BlockedHost, BlockLimits, is_gpu_id, lift_entries
from holdfast.core.terminal_sanitizer import strip_controls

_LAST_DATE = 2e11  # a date has no later year


def main(argv: list[str]) -> int:
    parser = CommandParser(
        prog="holdfast blocked",
        description="Show the hosts and GPUs that jobs refuse, because a machine was found bad or a person says so. "
        "Running jobs read the list whenever a host joins.",
    )
    verbs = parser.add_mutually_exclusive_group()
    verbs.add_argument("--lift", metavar="HOST|GPU", help="let this host or GPU join jobs again")
    verbs.add_argument("--add", metavar="HOST|GPU", help="block this host, or a GPU by its UUID")
    parser.add_argument("--why", metavar="TEXT", help="with --add: the reason, for those who are refused")
    default_s = BlockLimits().age_s
    parser.add_argument(
        "--for", type=float, dest="age_s", metavar="S", help=f"with --add: for so long (default {default_s:g})"
    )
    parser.add_argument(
        "--list", metavar="FILE", default="", help="the list, as in block.path (default: blocked.json in HOLDFAST_HOME)"
    )
    parser.add_argument("--journal", metavar="URL", help="the list of this database instead, of runs with --journal")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    args = parser.parse_args(argv)
    try:
        return _run_verb(args, _open_list(args))
    except (UsageError, BlockListError) as e:
        print(f"holdfast blocked: {e}", file=sys.stderr)
        return 2


def _open_list(args: argparse.Namespace) -> SharedBlockList:
    if args.journal is None:
        return BlockListFile(run_directory.block_list_path(args.list))
    if args.list:
        raise UsageError("--list names a file and --journal a database; drop one of them")
    journal_database_connection.check_database(args.journal, "--journal ")
    from holdfast.controller.access.block_list_database import BlockListDatabase

    return BlockListDatabase(args.journal)


def _run_verb(args: argparse.Namespace, listed: SharedBlockList) -> int:
    now = time.time()
    if args.add is None and (args.why is not None or args.age_s is not None):
        raise UsageError("--why and --for go with --add")
    if args.json and (args.add is not None or args.lift is not None):
        raise UsageError("--json shows the list; it does not go with --add or --lift")
    if args.add is not None:
        entry = _make_entry(args, now)
        listed.add_entry(entry)
        print(f"{strip_controls(args.add)} is blocked until {_date_text(entry.until)}")
    elif args.lift is not None:
        _lift_block(listed, args.lift, now)
        print(f"{strip_controls(args.lift)} may join jobs again")
    else:
        _show_list([entry for entry in listed.read_entries() if entry.until > now], as_json=args.json)
    return 0


def _make_entry(args: argparse.Namespace, now: float) -> BlockedHost:
    name, why = args.add, (args.why or "").strip()
    age_s = BlockLimits().age_s if args.age_s is None else args.age_s
    if not why or not why.isprintable() or len(why) > 500:
        raise UsageError("--add needs --why TEXT, up to 500 printable characters: those who are refused will read it")
    if not name or not name.isprintable() or " " in name or len(name) > 100:
        raise UsageError("--add takes the name of a host, its id, or the UUID of a GPU")
    if not 0 < age_s < float("inf"):
        raise UsageError("--for must be above 0")
    gpu = is_gpu_id(name)
    return BlockedHost(
        host="" if gpu else name,
        id="" if gpu else name,
        gpus=(name,) if gpu else (),
        reason=why,
        who=run_directory.user_name(),
        at=now,
        until=now + age_s,
    )


def _lift_block(listed: SharedBlockList, name: str, now: float) -> None:
    def lift(entries: Entries) -> Entries:
        left = lift_entries(entries, name)
        if left == entries:
            raise BlockListError(f"{name} is not blocked; holdfast blocked lists who is")
        return left

    listed.change(now, lift)


def _show_list(entries: list[BlockedHost], *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(entries).decode())
        return
    for entry in entries:
        by = f"by {entry.who}" if entry.who else f"by run {entry.run_id}"
        by += f", incident {entry.incident}" if entry.incident else ""
        what = " ".join(filter(None, (entry.host if entry.id else "", *entry.gpus)))
        if entry.host and not entry.id:
            what += f" (on {entry.host} then)"
        when = f"since {_date_text(entry.at)} {by}, until {_date_text(entry.until)}"
        print(strip_controls(f"{what}  {when}: {entry.reason}"))
    if not entries:
        print("nobody is blocked")


def _date_text(at: float) -> str:
    at = min(max(at, 0.0), _LAST_DATE)
    return datetime.fromtimestamp(at, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
