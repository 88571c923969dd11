"""Play the matrix and write its table.

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

from holdfast.chaos.fault import Cannot
from holdfast.chaos.matrix import table
from holdfast.chaos.matrix.cells import NAMED, STAGES, Cell, chosen
from holdfast.chaos.matrix.expected import Came, Row, judging, load, row_of, wrong
from holdfast.chaos.matrix.stage import SCRIPT, Failed, Stage, calm_run, staged
from holdfast.core.decoding import from_json

ROOT = Path(__file__).parents[3]
_CELLS = 12  # in one job: what is found at its end is told of all of them
RESULTS = ROOT / "benchmarks" / "results" / "chaos.jsonl"


class BadResults(Exception):
    """One sentence: why results cannot be read, and how to mend it."""


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the results."""

    cell: str
    commit: str
    at: str
    ok: bool
    wrong: tuple[str, ...]
    came: Came
    took_s: float


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that jobs are ended, and faults undone
    if not SCRIPT.exists():
        print(f"holdfast.chaos.matrix: {SCRIPT} is not there; run this in a checkout", file=sys.stderr)
        return 2
    try:
        if args.what == "table":
            return _write(args.results)
        cells = chosen(args.cells or ["all" if args.full else "covering"])
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.open("ab").close()  # better now than after the first job
        known = read(args.results)
    except (ValueError, BadResults) as e:
        print(f"holdfast.chaos.matrix: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"holdfast.chaos.matrix: results cannot be kept in {args.results}: {e.strerror}", file=sys.stderr)
        return 2
    commit = _commit()
    if not args.again:
        done = {one.cell for one in known if one.commit == commit and one.ok}
        cells = [cell for cell in cells if cell.name not in done]
    bad = play(cells, args, commit)
    _say(f"{len(cells)} cells, {len(bad)} not as expected")
    for cell in bad:
        _say(f"again: python -m holdfast.chaos.matrix run --again --cells {cell}")
    return 1 if bad else 0


def _write(results: Path) -> int:
    found = read(results)
    if not found:
        raise BadResults(f"{results} holds no results; play some cells first, or name another file by --results")
    (ROOT / "docs" / "FAULTS.md").write_text(table.page(load(), found))
    return 0


def _minutes(text: str) -> float:
    if not (found := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"a number of minutes above 0, not {text}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="holdfast.chaos.matrix", description="Every fault, way and moment.")
    what = parser.add_subparsers(dest="what", required=True)
    run = what.add_parser("run", help="play cells; those that passed at this commit are left out")
    run.add_argument("--cells", nargs="+", metavar="WORD", help="quick, fast, covering, all, or parts of names")
    run.add_argument("--full", action="store_true", help="all cells instead of a covering array")
    run.add_argument("--again", action="store_true", help="also those that have passed")
    run.add_argument("--folder", type=Path, help="keep the jobs here (default: a temporary folder, kept on failure)")
    run.add_argument("--minutes", type=_minutes, default=0.0, help="begin no further job after so long")
    shown = what.add_parser("table", help="write docs/FAULTS.md")
    for one in (run, shown):
        one.add_argument("--results", type=Path, default=RESULTS)
    return parser


def play(cells: list[Cell], args: argparse.Namespace, commit: str) -> list[str]:
    """All cells, as many as possible in one job; the names of those that are not as expected."""
    rows = load()
    bad: list[str] = []
    began = time.monotonic()
    for (kind, how), group in sorted(_groups(cells).items(), key=lambda one: (STAGES.index(one[0][0]), one[0][1])):
        left = list(group)
        while left:
            if args.minutes and time.monotonic() - began > 60 * args.minutes:
                _say(f"time is up; {len(left)} cells of {kind}/{how} and what follows are left")
                return bad
            these = together(left, rows)
            rest, failed = _job(kind, how, these, (args, commit, rows))
            left = [cell for cell in left if cell in rest or cell not in these]
            bad += failed
    return bad


def together(cells: list[Cell], rows: list[Row]) -> list[Cell]:
    """Those that one job is to play next: no fault twice, for what was told once is not told again within the hour.

    Evictions take turns with the rest, so that the next standby is there when it is needed; what spoils comes last, and
    only one of that: whether states differ by it could not be told of a second one.
    """
    found: dict[str, Cell] = {}
    for cell in cells:
        found.setdefault(cell.strike, cell)
    first = list(found.values())[:_CELLS]
    spoiling = [cell for cell in first if row_of(rows, cell).oracle == "blind"]
    evicting = [cell for cell in first if row_of(rows, cell).evicted]
    others = [cell for cell in first if cell not in spoiling and cell not in evicting]
    turns = itertools.zip_longest(others, evicting)
    return [cell for turn in turns for cell in turn if cell is not None] + spoiling[:1]


def _groups(cells: Iterable[Cell]) -> dict[tuple[str, str], list[Cell]]:
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((NAMED[cell.strike].stage, cell.how), []).append(cell)
    return found


def _job(
    kind: str, how: str, cells: list[Cell], given: tuple[argparse.Namespace, str, list[Row]]
) -> tuple[list[Cell], list[str]]:
    """Cells in one job, until it can take no more; those that are left, and those that failed."""
    args, commit, rows = given
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"holdfast-matrix-{kind}-{how}-", dir=args.folder))
    left = list(cells)
    took: dict[str, Tried] = {}
    trouble: list[str] = []
    _say(f"a job of {kind}/{how} for {len(cells)} cells in {folder}")
    try:
        with staged(kind, how, folder, _say) as (stage, mark):
            while left and all(one.came.back for one in took.values()):
                cell = left.pop(0)
                took[cell.name] = _tried(stage, cell, rows)
            trouble = stage.end(mark, how).wrong()
        if stage.steps:
            calm = calm_run(how, stage.steps, _cache(), _say)
            came = stage.compared({name: one.came for name, one in took.items()}, calm)
            took = {name: msgspec.structs.replace(one, came=came[name]) for name, one in took.items()}
    except (Failed, Cannot) as e:
        trouble.append(str(e).partition("\n")[0])
        if not took:  # nothing can be played at all
            took[left.pop(0).name] = Tried(came=Came(back=False))
    failed = [one.cell for one in _lines(took, rows, (commit, tuple(trouble))) if not _kept(args.results, one)]
    if not failed and not args.folder:
        shutil.rmtree(folder, ignore_errors=True)
    return left, failed


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    came: Came
    fault: str = ""  # why it could not be played to its end
    took_s: float = 0.0


def _tried(stage: Stage, cell: Cell, rows: list[Row]) -> Tried:
    _say(f"{cell.name} ...")
    began = time.monotonic()
    try:
        came, fault = stage.play(cell, rows), ""
    except (Failed, Cannot) as e:
        came, fault = Came(back=False), str(e).partition("\n")[0]
    return Tried(came=came, fault=fault, took_s=round(time.monotonic() - began, 1))


def _lines(took: dict[str, Tried], rows: list[Row], job: tuple[str, tuple[str, ...]]) -> Iterator[Played]:
    commit, trouble = job
    for name, one in took.items():
        row = judging(rows, Cell(*name.split("/")), one.came)
        found = (one.fault,) if one.fault else tuple(wrong(row, one.came))
        yield Played(
            cell=name,
            commit=commit,
            at=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
            ok=not found and not trouble,
            wrong=(*found, *(f"its job: {sentence}" for sentence in trouble)),
            came=one.came,
            took_s=one.took_s,
        )


def _kept(path: Path, line: Played) -> bool:
    """Written down and said; whether it is as expected."""
    keep(path, line)
    _say(f"{'ok  ' if line.ok else 'FAIL'} {line.cell} {'; '.join(line.wrong)}")
    return line.ok


def keep(path: Path, line: Played) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def read(path: Path) -> list[Played]:
    """Of each cell the newest line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise BadResults(f"{path} cannot be read: {e.strerror}; name another file by --results") from None
    found = [_result(path, number, line) for number, line in enumerate(lines, 1) if line]
    return list({one.cell: one for one in found}.values())


def _result(path: Path, number: int, line: bytes) -> Played:
    try:
        return from_json(line, Played)
    except msgspec.DecodeError as e:
        raise BadResults(f"line {number} of {path} is no result ({e}); mend or remove it") from None


def _commit() -> str:
    """The newest that has changed what is played; results that were kept since are no such change."""
    argv = ["git", "log", "-1", "--format=%h", "--", "holdfast", SCRIPT.relative_to(ROOT).as_posix()]
    told = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def _cache() -> Path:
    return Path(tempfile.gettempdir()) / "holdfast-matrix-calm"


def _say(text: str) -> None:
    print(f"matrix: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
