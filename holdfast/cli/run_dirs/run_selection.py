"""Chooses the run that a command is for: the one that is named, or the only possible one."""

import argparse
import contextlib
import hashlib
import time
from pathlib import Path

from holdfast.cli.run_dirs import run_directory, run_liveness
from holdfast.cli.run_dirs.run_places import known_runs as known_runs
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.quantity_text import duration_text

_SHOWN = 10  # runs that are listed where several may be meant
_HELP = "run directory, or id or part of it (default: the newest run)"
_HELP_ORDER = "run directory, or id or part of it (default: the only run that is alive)"


class AmbiguousRun(UsageError):
    """Several runs match the given part of an id."""


def add_run_argument(parser: argparse.ArgumentParser, *, order: bool = False) -> None:
    """Add a positional argument RUN and `--run RUN`; call this after the command's other positional arguments."""
    parser.add_argument("run", nargs="?", metavar="RUN", help=_HELP_ORDER if order else _HELP)
    parser.add_argument("--run", dest="named", metavar="RUN", help="the same as RUN alone")


def named_run(args: argparse.Namespace) -> str | None:
    alone: str | None = args.run
    if alone is not None and args.named is not None and alone != args.named:
        raise UsageError(f"two runs are named, {alone} and {args.named}; name one")
    return alone if args.named is None else str(args.named)


def find(name: str | None) -> Path:
    """Return a run by its directory, its id, or a unique beginning or end of its id; None means the newest."""
    try:
        return run_directory.find_run_dir(name)
    except run_directory.ForeignRun:
        raise
    except UsageError:
        if not name:
            raise
    ids = {run_dir: _id_of(run_dir) for run_dir in known_runs()}
    meant = [run_dir for run_dir, id in ids.items() if id == name]
    meant = meant or [run_dir for run_dir, id in ids.items() if _has_part(name, id, run_dir.name)]
    if len(meant) == 1:
        return meant[0]
    if not meant:
        why = "(it has no run.json), and no run id begins or ends with it; holdfast ls lists your runs"
        raise UsageError(f"{name} is not a run directory {why}")
    alike = len({ids[run_dir] for run_dir in meant}) < len(meant)
    shown = [str(run_dir) if alike else ids[run_dir] for run_dir in meant]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    raise AmbiguousRun(
        f"{name} may be any of {len(shown)} runs: {', '.join(shown[-_SHOWN:])}{more}; write more of its id"
    )


def _has_part(part: str, *names: str) -> bool:
    return any(name.startswith(part) or name.endswith(part) for name in names)


def _id_of(run_dir: Path) -> str:
    try:
        return run_directory.read_spec(run_dir).job.run_id
    except UsageError:
        return run_dir.name


def run_to_read(args: argparse.Namespace) -> Path:
    """Return the run to read: the named one, else the newest, or the only live run if the newest has ended."""
    if (name := named_run(args)) is not None:
        return find(name)
    newest = run_directory.find_run_dir(None)
    if not (newest / "exit.json").exists():
        return newest
    alive = [run_dir for run_dir in known_runs() if run_directory.find_controller(run_dir)]
    return alive[0] if len(alive) == 1 else newest


def run_to_change(args: argparse.Namespace) -> Path:
    """Return the run to change: the named or only live one. UsageError if it has ended or several are alive."""
    if (name := named_run(args)) is not None:
        run_dir = find(name)
        if since := _ended_since(run_dir):
            code = run_liveness.ending_text(run_dir).partition(":")[0]
            raise UsageError(f"the run in {run_dir} {code}, {since} ago")
        return run_dir
    alive = [run_dir for run_dir in known_runs() if run_directory.find_controller(run_dir)]
    if len(alive) > 1:
        shown = ", ".join(str(run_dir) for run_dir in alive)
        raise UsageError(f"{len(alive)} runs are alive; name one with --run: {shown}")
    if alive:
        return alive[0]
    newest = run_directory.find_run_dir(None)
    if _ended_since(newest):
        last = max({newest, *known_runs()}, key=_end_of)  # not the one that began last
        raise UsageError(f"no run is alive here; the last one, {last.name}, ended {_ended_since(last)} ago")
    return newest  # its controller may be back presently


def _ended_since(run_dir: Path) -> str:
    """Say how long ago a run ended; "" if it may still be alive."""
    at = _end_of(run_dir)
    return "" if not at or run_directory.find_controller(run_dir) else duration_text(max(0.0, time.time() - at))


def _end_of(run_dir: Path) -> float:
    try:
        return (run_dir / "exit.json").stat().st_mtime
    except OSError:
        return 0.0


def remember_run(run_dir: Path) -> None:
    """Record this run as the newest, and its path if it is outside of the usual folder; write errors are ignored."""
    run_directory.mark_newest(run_dir)
    if run_dir.parent == run_directory.holdfast_home() / "runs":
        return
    with contextlib.suppress(OSError):
        elsewhere = run_directory.holdfast_home() / "elsewhere"
        elsewhere.mkdir(parents=True, exist_ok=True)
        (elsewhere / hashlib.sha256(bytes(run_dir)).hexdigest()[:16]).symlink_to(run_dir)
