"""`holdfast clean`: removes the leftovers of killed runs, but only if a lock proves that the run is dead."""

import sys
from pathlib import Path

import msgspec

from holdfast.cli.run_dirs import run_directory, run_selection
from holdfast.cli.run_dirs.leftovers import Leftover, RunLeftovers, clean_run
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.quantity_text import counted_noun
from holdfast.core.snapshots.memory_grant import format_bytes

_NOUNS = {"process": "process", "write": "unfinished checkpoint", "folder": "folder", "file": "file"}
LEFT = 1  # something that was named, or that is dead, is still there


def main(argv: list[str]) -> int:
    parser = CommandParser(
        prog="holdfast clean",
        description="Remove what a run that is over has left behind: processes, sockets, working files of its nodes, "
        "checkpoints that were never finished. Keep its journal, its logs, its finished checkpoints and, if it can be "
        "resumed, what that takes. A run with a live process is left alone.",
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="run directories (./NAME), ids or parts of ids (default: the newest run)"
    )
    parser.add_argument("--run", action="append", default=[], metavar="RUN", help="the same as RUN alone; repeatable")
    parser.add_argument("--all", action="store_true", help="every run of yours on this host")
    parser.add_argument("--dry-run", action="store_true", help="show what would be removed, and remove nothing")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    args = parser.parse_args(argv)
    try:
        found = [
            clean_run(run_dir, dry_run=args.dry_run) for run_dir in _chosen_runs([*args.runs, *args.run], args.all)
        ]
    except UsageError as e:
        print(f"holdfast clean: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(msgspec.json.encode({"dry_run": args.dry_run, "runs": found}).decode())
    else:
        print("\n".join(line for one in found for line in _report_lines(one, args.dry_run)) or run_directory.NO_RUN)
    named = bool(args.runs or args.run)
    missed = any(one.failed or (one.state != "dead" and named) for one in found)
    return LEFT if missed else 0


def _chosen_runs(names: list[str], every: bool) -> list[Path]:
    if not every:
        found = [run_selection.find(name) for name in names] or [run_directory.find_newest()]
    elif names:
        raise UsageError("name runs or give --all, not both")
    else:
        found = run_selection.known_runs()
    for run_dir in found:
        run_directory.read_spec(run_dir)  # before anything is touched: what cannot be read is not ours to clean
    return list(dict.fromkeys(found))


def _report_lines(found: RunLeftovers, dry_run: bool) -> list[str]:
    if found.state != "dead":
        alive = "is alive" if found.state == "alive" else "may be alive"
        return [f"{found.run} {alive}, so nothing of it is removed: {found.why}"]
    lines = [f"{found.run} {found.why}"]
    if found.left:
        lines.append(
            f"  {'would remove' if dry_run else 'removed'} {_count_leftovers(found.left)}, "
            f"{format_bytes(found.bytes)} in all:"
        )
        lines += [
            f"    {_NOUNS[one.kind]} {one.name}, {format_bytes(one.bytes)}" for one in found.left if one.kind != "file"
        ]
        lines += [f"    {line}" for line in _files(found)]
    else:
        lines.append("  nothing is left to remove")
    lines += [f"  not removed: {sentence}" for sentence in found.failed]
    return lines + [
        f"  {'would keep' if dry_run else 'kept'} {k.what}, {format_bytes(k.bytes)}: {k.why}" for k in found.kept
    ]


def _files(found: RunLeftovers) -> list[str]:
    """Return one line for each folder of the run that has leftover files; the line names the files and their size."""
    names: dict[str, list[str]] = {}
    total: dict[str, int] = {}
    for one in found.left:
        if one.kind == "file":
            path = Path(one.name).relative_to(found.run)
            folder = "" if path.parent == Path() else f"{path.parent}/"
            names.setdefault(folder, []).append(path.name)
            total[folder] = total.get(folder, 0) + one.bytes
    return [
        f"{folder or 'files'}: {', '.join(found)}, {format_bytes(total[folder])}" for folder, found in names.items()
    ]


def _count_leftovers(left: tuple[Leftover, ...]) -> str:
    counts = {kind: sum(one.kind == kind for one in left) for kind in _NOUNS}
    return ", ".join(counted_noun(count, _NOUNS[kind]) for kind, count in counts.items() if count)
