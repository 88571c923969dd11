"""Chooses the run that a command is for: the one that is named, or the only possible one."""

import argparse
import contextlib
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.cli.run_dirs import batch_job_note, run_directory, run_liveness
from holdfast.cli.run_dirs.local_run_list import is_own_run
from holdfast.cli.run_dirs.local_run_list import known_runs as known_runs
from holdfast.cli.run_dirs.run_dir_trust import make_private_folder
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.quantity_text import duration_text

_SHOWN = 10  # runs that are listed where several may be meant
_HELP = "run directory (./NAME), or id or part of it (default: the newest run)"
_HELP_ORDER = "run directory (./NAME), or id or part of it (default: the only run that is alive)"


class NoSuchRun(UsageError):
    """No run and no folder here has the given name."""


def add_run_argument(parser: argparse.ArgumentParser, *, order: bool = False) -> None:
    """Add a positional argument RUN and `--run RUN`. Call this after the command's other positional arguments. With
    `order`, the help says that a command without RUN acts on the only live run, not on the newest."""
    parser.add_argument("run", nargs="?", metavar="RUN", help=_HELP_ORDER if order else _HELP)
    parser.add_argument("--run", dest="named", metavar="RUN", help="the same as RUN alone")


def named_run(args: argparse.Namespace) -> str | None:
    alone: str | None = args.run
    if alone is not None and args.named is not None and alone != args.named:
        raise UsageError(f"two runs are named, {alone} and {args.named}; name one")
    return alone if args.named is None else str(args.named)


def find(name: str | None) -> Path:
    """Return a run by its directory, its id, or a unique beginning or end of its id; None means the newest. Only a name
    with a slash is a path. Without a slash, somebody else's folder here could pass for the user's run."""
    if name is None:
        return run_directory.find_newest()
    if "/" in name or name in (".", ".."):
        if not run_directory.holds_run(Path(name)):
            _tell_waiting(Path(name).absolute())
            raise NoSuchRun(f"{name} is not a run directory (it has no run.json); holdfast ls lists your runs")
        return run_directory.require_own(Path(name).absolute())
    if is_own_run(name):
        ids, meant = {}, [run_directory.require_own((run_directory.holdfast_home() / "runs" / name).absolute())]
    else:
        ids = {run_dir: _id_of(run_dir) for run_dir in known_runs()} if name else {}
        meant = _choose_meant(name, ids)
    here = Path(name) if name and run_directory.holds_run(Path(name)) else None
    if len(meant) > 1 and here:
        meant = [run_dir for run_dir in meant if run_dir.samefile(here)] or meant
    if len(meant) == 1:
        if here and not meant[0].samefile(here):
            told = f"{name} is taken for your run {meant[0]}; for the folder here write ./{name}"
            print(f"holdfast: {told}", file=sys.stderr)
        return meant[0]
    if not meant and here:
        raise UsageError(f"{name} is no run that you have started here; for the folder of this name write ./{name}")
    if not meant:
        _tell_waiting(run_directory.holdfast_home() / "runs" / name)
        raise NoSuchRun(f"{name} is no run id, and no run id begins or ends with it; holdfast ls lists your runs")
    alike = len({ids[run_dir] for run_dir in meant}) < len(meant)
    shown = [str(run_dir) if alike else ids[run_dir] for run_dir in meant]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    raise UsageError(
        f"{name} may be any of {len(shown)} runs: {', '.join(shown[-_SHOWN:])}{more}; write more of its id"
    )


def _tell_waiting(run_dir: Path) -> None:
    """Raise NoSuchRun if a batch job that Slurm has not started yet is to make this run."""
    if job := batch_job_note.read_job(run_dir):
        told = f"job {job} of Slurm is to carry it, and squeue --jobs={job} says why that waits"
        raise NoSuchRun(f"the run in {run_dir} has not begun: {told}")


def _choose_meant(name: str, ids: dict[Path, str]) -> list[Path]:
    """Return the runs that a name may mean. If it is the id of runs, return these. Else return the runs whose folder
    has this name. If there are none, return those with the name as a part of their id or folder name."""
    fits: tuple[Callable[[Path], bool], ...] = (
        lambda run_dir: ids[run_dir] == name,
        lambda run_dir: run_dir.name == name,
        lambda run_dir: _has_part(name, ids[run_dir], run_dir.name),
    )
    return next((found for fit in fits if (found := [run_dir for run_dir in ids if fit(run_dir)])), [])


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
    newest = run_directory.find_newest()
    if not (newest / "exit.json").exists():
        return newest
    alive = [run_dir for run_dir in known_runs() if run_directory.find_controller(run_dir)]
    return alive[0] if len(alive) == 1 else newest


def run_to_change(args: argparse.Namespace) -> Path:
    """Return the run to change: the named one, else the only live one. Raise UsageError if the run has ended, or if no
    run is named and several are alive."""
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
    newest = run_directory.find_newest()
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
        make_private_folder(elsewhere)
        (elsewhere / hashlib.sha256(bytes(run_dir)).hexdigest()[:16]).symlink_to(run_dir)
