"""`holdfast clean`: remove what runs that were killed have left, and only what a lock proves dead."""

import sys
from pathlib import Path

import msgspec

from holdfast.cli import rundir, runs
from holdfast.cli.flagtable import UsageError
from holdfast.cli.leftovers import Found, Leftover, clean
from holdfast.cli.parsing import CommandParser
from holdfast.cli.wording import counted
from holdfast.core.memory import size

_NOUNS = {"process": "left process", "write": "unfinished checkpoint", "file": "file"}
LEFT = 1  # something that was named, or that is dead, is still there


def main(argv: list[str]) -> int:
    parser = CommandParser(
        prog="holdfast clean",
        description="Remove what runs that were killed have left: sockets, notes, processes, unfinished checkpoints. "
        "A run is touched only if its locks prove that none of its processes is alive. Journals, logs and checkpoints "
        "are kept.",
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="run directories, ids or parts of ids (default: the newest run)"
    )
    parser.add_argument("--run", action="append", default=[], metavar="RUN", help="the same as RUN alone; repeatable")
    parser.add_argument("--all", action="store_true", help="every run of yours on this host")
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    args = parser.parse_args(argv)
    try:
        found = [clean(run_dir, dry_run=args.dry_run) for run_dir in _chosen([*args.runs, *args.run], args.all)]
    except UsageError as e:
        print(f"holdfast clean: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(msgspec.json.encode({"dry_run": args.dry_run, "runs": found}).decode())
    else:
        print("\n".join(line for one in found for line in _lines(one, args.dry_run)) or "there is no run yet")
    missed = any(one.failed or (one.state != "dead" and not args.all) for one in found)
    return LEFT if missed else 0


def _chosen(names: list[str], every: bool) -> list[Path]:
    if not every:
        found = [runs.find(name) for name in names] or [rundir.find(None)]
    elif names:
        raise UsageError("name runs, or say --all, not both")
    else:
        found = runs.known()
    for run_dir in found:
        rundir.read_spec(run_dir)  # before anything is touched: what cannot be read is not ours to clean
    return list(dict.fromkeys(found))


def _lines(found: Found, dry_run: bool) -> list[str]:
    if found.state != "dead":
        alive = "alive" if found.state == "alive" else "left alone, for nothing proves it dead"
        return [f"{found.run}: {alive}: {found.why}"]
    did = "would remove" if dry_run else "removed"
    what = f"{did} {_counted(found.left)}, {size(found.bytes)}" if found.left else "there is nothing to remove"
    lines = [f"{found.run}: {found.why}; {what}; kept: {', '.join(found.kept)}"]
    lines += [f"  {_NOUNS[one.kind]} {one.name}, {size(one.bytes)}" for one in found.left if one.kind != "file"]
    files = [str(Path(one.name).relative_to(found.run)) for one in found.left if one.kind == "file"]
    lines += [f"  in it: {', '.join(files)}"] if files else []
    return lines + [f"  not removed: {sentence}" for sentence in found.failed]


def _counted(left: tuple[Leftover, ...]) -> str:
    counts = {kind: sum(one.kind == kind for one in left) for kind in _NOUNS}
    return ", ".join(counted(count, _NOUNS[kind]) for kind, count in counts.items() if count)
