"""Losses that only a real logger gets: which package, what was read, and whether a leap and a NaN were seen.

Every package that is installed beside holdfast runs once: W&B offline, MLflow with SQLite, TensorBoard, Lightning's CSV
logger and the Trainer of transformers, by scripts that import nothing of ours.
"""

import contextlib
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks._harness import Job, holdfast
from benchmarks._report import Figure, Findings, report
from holdfast.cli.commands.report_command import load_report
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.journal_entry import Entry

PACKAGES = ("wandb", "mlflow", "tensorboard", "lightning", "transformers")
SCRIPT = Path(__file__).with_name("_logged_rank.py")
LIMIT_S = 300.0
SOURCE = "loss: read from "


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a job with one logger led to."""

    source: str  # as the console names it
    leap_told: bool
    nan_acted: bool
    nan_s: float | None  # from the first loss that is no number, as its rank dates it, until it was acted on
    code: int | None


def main() -> None:
    table = Table(title=(__doc__ or "").splitlines()[0])
    for column in ("package", "version", "read from", "leap told", "NaN acted on", "after"):
        table.add_column(column)
    figures: dict[str, Figure] = {}
    goals: dict[str, bool] = {}
    skipped: dict[str, str] = {}
    for package in PACKAGES:
        if find_spec(package) is None:
            skipped[package] = "not installed"
            continue
        seen, of = try_package(package), _version_of(package)
        after = "" if seen.nan_s is None else f"{seen.nan_s:.1f} s"
        table.add_row(package, of, seen.source, str(seen.leap_told), str(seen.nan_acted), after)
        figures |= {f"{package} version": of, f"{package} read from": seen.source, f"{package} nan_s": seen.nan_s}
        goals[f"{package}: leap told, NaN acted on, the job ends well"] = (
            seen.leap_told and seen.nan_acted and seen.code == 0
        )
    report("logged", table, Findings(figures=figures, goals=goals, skipped=skipped))


def try_package(package: str) -> Seen:
    with Job(1) as job:
        run_dir = job.folder / "run"
        run = [*holdfast(run_dir, "--nproc-per-node=1", "--set=probe.allow=false"), str(SCRIPT), package]
        launcher = job.spawn([*run, str(job.folder)])
        job.wait(lambda: launcher.poll(), LIMIT_S)
        said = (job.folder / "launcher0.log").read_text(errors="replace")
        print(said[-2000:], file=sys.stderr)
        if not (run_dir / "journal.db").exists():
            return Seen(source="", leap_told=False, nan_acted=False, nan_s=None, code=launcher.poll())
        return _what_was_seen(run_dir, said, launcher.poll())


def _what_was_seen(run_dir: Path, said: str, code: int | None) -> Seen:
    with contextlib.closing(SqliteJournal(run_dir / "journal.db", read_only=True)) as journal:
        heard = [entry for entry in journal.read() if isinstance(entry.event, Alarm) and entry.event.kind is Kind.LOSS]
    acted = [entry for entry in heard if _alarm_of(entry).stance is Stance.ACT]
    told = [entry for entry in heard if _alarm_of(entry).evidence and _alarm_of(entry).stance is Stance.NOTIFY]
    kinds = [record.kind for record in load_report(run_dir).incidents]
    return Seen(
        source=next((line.partition(SOURCE)[2] for line in said.splitlines() if SOURCE in line), ""),
        leap_told=bool(told),
        nan_acted=bool(acted) and kinds == [Kind.LOSS],
        nan_s=round(acted[0].at - _alarm_of(acted[0]).at, 2) if acted else None,
        code=code,
    )


def _alarm_of(entry: Entry) -> Alarm:
    assert isinstance(entry.event, Alarm)
    return entry.event


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"


if __name__ == "__main__":
    main()
