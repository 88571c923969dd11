"""Finds this user's runs; imports nothing slow, because shell completion runs it at every key press."""

import contextlib
import os
from pathlib import Path


def holdfast_home() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(os.environ.get("HOLDFAST_HOME") or Path(state) / "holdfast")


def known_runs() -> list[Path]:
    """Return every existing run of this user on this host, oldest first."""
    found = {path.parent for path in (holdfast_home() / "runs").glob("*/run.json")}
    elsewhere = holdfast_home() / "elsewhere"
    for link in elsewhere.iterdir() if elsewhere.is_dir() else ():
        with contextlib.suppress(OSError):
            if (link / "run.json").exists():
                found.add(link.resolve())
            else:
                link.unlink()
    return sorted(found, key=lambda run_dir: ((run_dir / "run.json").stat().st_mtime, run_dir))
