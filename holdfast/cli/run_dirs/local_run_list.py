"""Finds this user's runs; imports nothing slow, because shell completion runs it at every key press."""

import contextlib
import os
from pathlib import Path

from holdfast.cli.run_dirs.run_dir_trust import foreign_reason

# What holdfast puts there.
HOME_NAMES = ("newest", "runs", "elsewhere", "script-imports", "join", "chaos", "people.json", "blocked.json")


def holdfast_home() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(os.environ.get("HOLDFAST_HOME") or Path(state) / "holdfast")


def is_own_run(name: str) -> bool:
    """Return whether this user has a run of this name in the usual folder. Commands prefer such a run to a file of the
    same name."""
    return "/" not in name and (holdfast_home() / "runs" / name / "run.json").exists()


def known_runs() -> list[Path]:
    """Return every existing run of this user on this host, oldest first; folders of other users are left out."""
    found = {path.parent for path in (holdfast_home() / "runs").glob("*/run.json")}
    elsewhere = holdfast_home() / "elsewhere"
    for link in elsewhere.iterdir() if elsewhere.is_dir() else ():
        with contextlib.suppress(OSError):
            if (link / "run.json").exists():
                found.add(link.resolve())
            else:
                link.unlink()
    own = [run_dir for run_dir in found if not foreign_reason(run_dir)]
    return sorted(own, key=lambda run_dir: ((run_dir / "run.json").stat().st_mtime, run_dir))
