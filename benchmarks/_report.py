"""How a benchmark says what it found: a table for people, then one line of JSON, and a record when BENCH_FULL=1."""

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
from rich.console import Console
from rich.table import Table

FULL = os.environ.get("BENCH_FULL") == "1"  # more repetitions, and a record of the results
RECORDS = Path(__file__).with_name("results")

Figure: TypeAlias = float | str | None


class Findings(msgspec.Struct):
    """What was measured, which goals it meets, and what could not be measured here and why."""

    figures: dict[str, Figure] = {}
    goals: dict[str, bool] = {}
    skipped: dict[str, str] = {}


def report(name: str, table: Table, findings: Findings, runs: dict[str, list[float | None]] | None = None) -> None:
    """Print everything, the line of JSON last; `runs` are the single measurements behind the figures."""
    Console(width=None if os.isatty(1) else 140).print(table)
    for goal, met in findings.goals.items():
        print(f"goal {goal}: {'met' if met else 'MISSED'}")
    for part, why in findings.skipped.items():
        print(f"skipped {part}: {why}")
    if FULL:
        print(f"recorded in {_record(name, findings, runs or {})}")
    print(json.dumps(msgspec.to_builtins(findings)), flush=True)


def median(measured: Sequence[float | None]) -> float | None:
    """The median; what never came counts as later than all that did."""
    middle = statistics.median(float("inf") if one is None else one for one in measured)
    return None if middle == float("inf") else middle


def brief(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds:.2f}"


def _record(name: str, findings: Findings, runs: dict[str, list[float | None]]) -> Path:
    now = datetime.datetime.now(datetime.UTC)
    RECORDS.mkdir(exist_ok=True)
    record = {
        "name": name,
        "at": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load": os.getloadavg()[0],
        **msgspec.to_builtins(findings),
        "runs": runs,
    }
    path = RECORDS / f"{name}-{now:%Y%m%d}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path.relative_to(RECORDS.parents[1])


def commit(records: Path = RECORDS) -> str:
    """The commit measured, with a plus sign when files that git tracks have changed since, other than records: several
    benchmarks one after the other write them, and nothing that is measured reads them."""
    found = _git(records, "describe", "--always", "--abbrev=12")
    changed = _git(records, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude).")
    return f"{found}{'+' if changed else ''}" if found else "unknown"


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip()
