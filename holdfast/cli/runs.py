"""Which run a command means: the one that is named, or the only one that can be meant."""

import argparse
import contextlib
import hashlib
from pathlib import Path

from holdfast.cli import rundir
from holdfast.cli.flagtable import UsageError

_HELP = "run directory or id (default: the newest run)"
_HELP_ORDER = "run directory or id (default: the only run that is alive)"


def add_run(parser: argparse.ArgumentParser, *, order: bool = False, positional: bool = True) -> None:
    """`--run RUN` in every command, and for short RUN alone where nothing else is named."""
    said = _HELP_ORDER if order else _HELP
    if positional:
        parser.add_argument("run", nargs="?", metavar="RUN", help=said)
    parser.add_argument("--run", dest="named", metavar="RUN", help="the same as RUN alone" if positional else said)


def named(args: argparse.Namespace) -> str | None:
    alone: str | None = getattr(args, "run", None)
    if alone is not None and args.named is not None and alone != args.named:
        raise UsageError(f"two runs are named, {alone} and {args.named}; name one")
    return alone if args.named is None else str(args.named)


def looked_at(args: argparse.Namespace) -> Path:
    """The run directory of a command that only looks: the newest, or the only one alive if that has ended."""
    if (name := named(args)) is not None:
        return rundir.find(name)
    newest = rundir.find(None)
    if not (newest / "exit.json").exists():
        return newest
    alive = [run_dir for run_dir in known() if rundir.listening(run_dir)]
    return alive[0] if len(alive) == 1 else newest


def ordered(args: argparse.Namespace) -> Path:
    """The run directory of a command that changes something: never a guess between two that are alive."""
    if (name := named(args)) is not None:
        return rundir.find(name)
    alive = [run_dir for run_dir in known() if rundir.listening(run_dir)]
    if len(alive) > 1:
        shown = ", ".join(str(run_dir) for run_dir in alive)
        raise UsageError(f"{len(alive)} runs are alive; name one with --run: {shown}")
    return alive[0] if alive else rundir.find(None)


def known() -> list[Path]:
    """Every run of this user on this host that is still there, the oldest first."""
    found = {path.parent for path in (rundir.home() / "runs").glob("*/run.json")}
    elsewhere = rundir.home() / "elsewhere"
    for link in elsewhere.iterdir() if elsewhere.is_dir() else ():
        with contextlib.suppress(OSError):
            if (link / "run.json").exists():
                found.add(link.resolve())
            else:
                link.unlink()
    return sorted(found, key=lambda run_dir: ((run_dir / "run.json").stat().st_mtime, run_dir))


def note(run_dir: Path) -> None:
    """The newest run, and where to find it later; a home that cannot be written is no reason to fail."""
    rundir.mark_newest(run_dir)
    if run_dir.parent == rundir.home() / "runs":
        return
    with contextlib.suppress(OSError):
        elsewhere = rundir.home() / "elsewhere"
        elsewhere.mkdir(parents=True, exist_ok=True)
        (elsewhere / hashlib.sha256(bytes(run_dir)).hexdigest()[:16]).symlink_to(run_dir)
