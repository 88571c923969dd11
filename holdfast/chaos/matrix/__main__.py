"""Runs the cells of the matrix and writes their table.

python -m holdfast.chaos.matrix run [--cells WORD ...] [--again] [--full]
python -m holdfast.chaos.matrix table
"""

import argparse
import itertools
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from holdfast.chaos.injection_records import CannotInject
from holdfast.chaos.matrix import faults_page
from holdfast.chaos.matrix.cell_stage import SCRIPT, CellStage, StageFailed, calm_run, open_stage
from holdfast.chaos.matrix.cells import NAMED, STAGES, MatrixCell, choose_cells
from holdfast.chaos.matrix.expectations import (
    CellOutcome,
    ExpectedRow,
    closest_row,
    find_deviations,
    judging_row,
    load_rows,
)
from holdfast.decoding import from_json

ROOT = Path(__file__).parents[3]
_CELLS = 12  # in one job: what is found at its end is told of all of them
RESULTS = ROOT / "benchmarks" / "results" / "chaos.jsonl"


class BadResults(Exception):
    """Results cannot be read; the message is one sentence that says why and how to fix it."""


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the results file."""

    cell: str
    commit: str
    at: str
    ok: bool
    wrong: tuple[str, ...]
    came: CellOutcome
    took_s: float


def main(argv: list[str] | None = None) -> int:
    args = _make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that jobs are ended, and faults undone
    if not SCRIPT.exists():
        print(f"holdfast.chaos.matrix: {SCRIPT} is not there; run this in a checkout", file=sys.stderr)
        return 2
    try:
        if args.what == "table":
            return _write_page(args.results)
        cells = choose_cells(args.cells or ["all" if args.full else "covering"])
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.open("ab").close()  # better now than after the first job
        known = read_results(args.results)
    except (ValueError, BadResults) as e:
        print(f"holdfast.chaos.matrix: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"holdfast.chaos.matrix: results cannot be kept in {args.results}: {e.strerror}", file=sys.stderr)
        return 2
    commit = _newest_commit()
    if not args.again:
        done = {one.cell for one in known if one.commit == commit and one.ok}
        cells = [cell for cell in cells if cell.name not in done]
    bad = play_cells(cells, args, commit)
    _say(f"{len(cells)} cells, {len(bad)} not as expected")
    for cell in bad:
        _say(f"again: python -m holdfast.chaos.matrix run --again --cells {cell}")
    return 1 if bad else 0


def _write_page(results: Path) -> int:
    found = read_results(results)
    if not found:
        raise BadResults(f"{results} holds no results; play some cells first, or name another file by --results")
    (ROOT / "docs" / "FAULTS.md").write_text(faults_page.render_page(load_rows(), found))
    return 0


def _parse_minutes(text: str) -> float:
    if not (found := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"a number of minutes above 0, not {text}")
    return found


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="holdfast.chaos.matrix", description="Every fault, way and moment.")
    what = parser.add_subparsers(dest="what", required=True)
    run = what.add_parser("run", help="play cells; those that passed at this commit are left out")
    run.add_argument("--cells", nargs="+", metavar="WORD", help="quick, fast, covering, all, or parts of names")
    run.add_argument("--full", action="store_true", help="all cells instead of a covering array")
    run.add_argument("--again", action="store_true", help="also those that have passed")
    run.add_argument("--folder", type=Path, help="keep the jobs here (default: a temporary folder, kept on failure)")
    run.add_argument("--minutes", type=_parse_minutes, default=0.0, help="begin no further job after so long")
    shown = what.add_parser("table", help="write docs/FAULTS.md")
    for one in (run, shown):
        one.add_argument("--results", type=Path, default=RESULTS)
    return parser


def play_cells(cells: list[MatrixCell], args: argparse.Namespace, commit: str) -> list[str]:
    """Run all cells, as many as possible in one job; return the names of cells with an unexpected outcome."""
    rows = load_rows()
    bad: list[str] = []
    began = time.monotonic()
    for (kind, how), group in sorted(_group_cells(cells).items(), key=lambda one: (STAGES.index(one[0][0]), one[0][1])):
        left = list(group)
        while left:
            if args.minutes and time.monotonic() - began > 60 * args.minutes:
                _say(f"time is up; {len(left)} cells of {kind}/{how} and what follows are left")
                return bad
            these = choose_together(left, rows)
            rest, failed = _play_job(kind, how, these, (args, commit, rows))
            left = [cell for cell in left if cell in rest or cell not in these]
            bad += failed
    return bad


def choose_together(cells: list[MatrixCell], rows: list[ExpectedRow]) -> list[MatrixCell]:
    """Choose the cells of the next job. No fault comes twice, because an alarm is not repeated within the hour.

    Evictions alternate with other cells, so that the next standby is ready in time. At most one cell corrupts the
    state, and only as the last cell: the state comparison cannot detect a second corruption.
    """
    found: dict[str, MatrixCell] = {}
    for cell in cells:
        found.setdefault(cell.strike, cell)
    first = list(found.values())[:_CELLS]
    spoiling = [cell for cell in first if closest_row(rows, cell).oracle == "blind"]
    evicting = [cell for cell in first if closest_row(rows, cell).evicted]
    others = [cell for cell in first if cell not in spoiling and cell not in evicting]
    turns = itertools.zip_longest(others, evicting)
    return [cell for turn in turns for cell in turn if cell is not None] + spoiling[:1]


def _group_cells(cells: Iterable[MatrixCell]) -> dict[tuple[str, str], list[MatrixCell]]:
    found: dict[tuple[str, str], list[MatrixCell]] = {}
    for cell in cells:
        found.setdefault((NAMED[cell.strike].stage, cell.how), []).append(cell)
    return found


def _play_job(
    kind: str, how: str, cells: list[MatrixCell], given: tuple[argparse.Namespace, str, list[ExpectedRow]]
) -> tuple[list[MatrixCell], list[str]]:
    """Run cells in one job until the job cannot go on; return the cells not run and the names of failed cells. `given`
    is the command line's arguments, the newest commit, and the expected rows."""
    args, commit, rows = given
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"holdfast-matrix-{kind}-{how}-", dir=args.folder))
    left = list(cells)
    took: dict[str, CellAttempt] = {}
    trouble: list[str] = []
    _say(f"a job of {kind}/{how} for {len(cells)} cells in {folder}")
    try:
        with open_stage(kind, how, folder, _say) as (stage, mark):
            while left and all(one.came.back for one in took.values()):
                cell = left.pop(0)
                took[cell.name] = _try_cell(stage, cell, rows)
            trouble = stage.end_job(mark, how).all_wrong()
        if stage.steps:
            calm = calm_run(how, stage.steps, _calm_cache(), _say)
            came = stage.compare_states({name: one.came for name, one in took.items()}, calm)
            took = {name: msgspec.structs.replace(one, came=came[name]) for name, one in took.items()}
    except (StageFailed, CannotInject) as e:
        trouble.append(str(e).partition("\n")[0])
        if not took:  # nothing can be played at all
            took[left.pop(0).name] = CellAttempt(came=CellOutcome(back=False))
    failed = [
        one.cell
        for one in _judge_attempts(took, rows, (commit, tuple(trouble)))
        if not _keep_and_say(args.results, one)
    ]
    if not failed and not args.folder:
        shutil.rmtree(folder, ignore_errors=True)
    return left, failed


class CellAttempt(msgspec.Struct, frozen=True, kw_only=True):
    came: CellOutcome
    fault: str = ""  # why it could not be played to its end
    took_s: float = 0.0


def _try_cell(stage: CellStage, cell: MatrixCell, rows: list[ExpectedRow]) -> CellAttempt:
    _say(f"{cell.name} ...")
    began = time.monotonic()
    try:
        came, fault = stage.play_cell(cell, rows), ""
    except (StageFailed, CannotInject) as e:
        came, fault = CellOutcome(back=False), str(e).partition("\n")[0]
    return CellAttempt(came=came, fault=fault, took_s=round(time.monotonic() - began, 1))


def _judge_attempts(
    took: dict[str, CellAttempt], rows: list[ExpectedRow], job: tuple[str, tuple[str, ...]]
) -> Iterator[CellResult]:
    commit, trouble = job
    for name, one in took.items():
        row = judging_row(rows, MatrixCell(*name.split("/")), one.came)
        found = (one.fault,) if one.fault else tuple(find_deviations(row, one.came))
        yield CellResult(
            cell=name,
            commit=commit,
            at=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
            ok=not found and not trouble,
            wrong=(*found, *(f"its job: {sentence}" for sentence in trouble)),
            came=one.came,
            took_s=one.took_s,
        )


def _keep_and_say(path: Path, line: CellResult) -> bool:
    """Append a result to the file and print it; return whether it is as expected."""
    append_result(path, line)
    _say(f"{'ok  ' if line.ok else 'FAIL'} {line.cell} {'; '.join(line.wrong)}")
    return line.ok


def append_result(path: Path, line: CellResult) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def read_results(path: Path) -> list[CellResult]:
    """Return the newest result of each cell; raises BadResults."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise BadResults(f"{path} cannot be read: {e.strerror}; name another file by --results") from None
    found = [_parse_result(path, number, line) for number, line in enumerate(lines, 1) if line]
    return list({one.cell: one for one in found}.values())


def _parse_result(path: Path, number: int, line: bytes) -> CellResult:
    try:
        return from_json(line, CellResult)
    except msgspec.DecodeError as e:
        raise BadResults(f"line {number} of {path} is no result ({e}); mend or remove it") from None


def _newest_commit() -> str:
    """Return the newest commit that changed the package or the script; commits of results do not count."""
    argv = ["git", "log", "-1", "--format=%h", "--", "holdfast", SCRIPT.relative_to(ROOT).as_posix()]
    told = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def _calm_cache() -> Path:
    return Path(tempfile.gettempdir()) / "holdfast-matrix-calm"


def _say(text: str) -> None:
    print(f"matrix: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
