"""`holdfast catalog`: shows, checks and extends the catalog of patterns that recognize failures in ranks' output."""

import argparse
import sys
import time
from pathlib import Path

import msgspec

from holdfast.cli.commands.diagnose_command import find_logs
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.flag_values import parse_settings as pairs
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.quantity_text import counted_noun
from holdfast.config import ConfigError, Settings, load
from holdfast.core.log_analysis.failure_catalog import CatalogRow
from holdfast.core.log_analysis.line_prefixes import parse_lines
from holdfast.core.terminal_sanitizer import strip_controls
from holdfast.logs import catalog_files, regex_safety, user_rows
from holdfast.logs.opinion_choice import read_telling_lines_of
from holdfast.logs.past_cases import PastCase, PastCases
from holdfast.logs.secret_masking import Masker, make_masker

FAULTY = 1
_NOTE_CHARS = 300
_SHOWN_LINES = 5


def main(argv: list[str]) -> int:
    args = _make_parser().parse_args(argv)
    verbs = {
        "ls": _list_rows,
        "check": _check_rows,
        "add": _add_rows,
        "reject": _reject_row,
        "propose": _propose_row,
        "correct": _correct_failure,
        "past": _list_past,
    }
    try:
        return verbs[args.verb](args, load(args.config, pairs(args.set)))
    except (UsageError, ConfigError) as e:
        print(f"holdfast catalog {args.verb}: {e}", file=sys.stderr)
    except OSError as e:
        print(f"holdfast catalog {args.verb}: cannot read {e.filename or 'a log'}: {e.strerror}", file=sys.stderr)
    return 2


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="holdfast catalog", description="Show the catalog of last words, and add to it.")
    settings = CommandParser(add_help=False)
    settings.add_argument("--config", metavar="FILE", help="settings as TOML; words.catalog names your rows")
    settings.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one setting")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, help: str, what: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=help, description=what, parents=[settings])

    ls = verb("ls", "list your rows and what is proposed", "List your own rows and those that wait to be accepted.")
    ls.add_argument("--all", action="store_true", help="include holdfast's own rows")
    ls.add_argument("--json", action="store_true", help="print them as JSON")
    what = "Check that the rows of a file could be added: complete, bounded, true to their samples, no collision."
    verb("check", "check that rows could be added", what).add_argument("file", metavar="FILE_OR_ID")
    what = "Accept rows: those of a file, or a proposed one by its id. They are checked first."
    verb("add", "accept rows", what).add_argument("file", metavar="FILE_OR_ID")
    what = "Remove a proposed row, by its id, without accepting it."
    verb("reject", "remove a proposed row", what).add_argument("id", metavar="ID")
    what = "Say what a failure was, so that it is known when it comes again: the past failures are kept on this host."
    correct = verb("correct", "say what a failure was", what)
    correct.add_argument("klass", metavar="CLASS", help="failure class that it was")
    correct.add_argument("logs", nargs="*", metavar="FILE", help="its logs, or its run, as for holdfast diagnose")
    correct.add_argument("--note", default="", metavar="TEXT", help="the cause in your own words")
    past = verb("past", "list past failures", "List past failures, and who said what they were.")
    past.add_argument("--json", action="store_true", help="print them as JSON")
    propose = verb("propose", "propose a row for a line", "Propose a row for a line, to be accepted later.")
    propose.add_argument("klass", metavar="CLASS", help="failure class that the line shows")
    propose.add_argument("line", metavar="LINE", help="the line, as it was printed; - reads it from standard input")
    return parser


def _list_rows(args: argparse.Namespace, settings: Settings) -> int:
    path = user_rows.user_rows_path(settings.words)
    mine = user_rows.read_user_rows(path)
    waiting = {name: user_rows.read_user_rows(file) for name, file in user_rows.list_proposals(path).items()}
    ours = catalog_files.load_failures().rows
    if args.json:
        tree = {"own": mine, "proposed": waiting} | ({"ours": ours} if args.all else {})
        print(msgspec.json.encode(tree).decode())
        return 0
    for row in ours if args.all else ():
        print(_row_line("holdfast", row))
    for row in mine:
        print(_row_line("own", row))
    for name, rows in waiting.items():
        print("\n".join(_row_line(name, row) for row in rows))
    print(f"{counted_noun(len(ours), 'row')} of holdfast, {len(mine)} of your own in {path}, {len(waiting)} proposed")
    return 0


def _row_line(whose: str, row: CatalogRow) -> str:
    return f"{whose:<10} {row.klass:<26} {row.role} {row.weight}  {row.pattern or f'exit code {row.code}'}"


def _read_rows(wanted: str, path: Path) -> tuple[CatalogRow, ...]:
    """Return the catalog rows of a proposal, given by its id, or of a file."""
    file = user_rows.list_proposals(path).get(wanted) or Path(wanted)
    if not file.exists():
        raise UsageError(f"there is no file and no proposal '{wanted}'; holdfast catalog ls shows what is proposed")
    rows = user_rows.read_user_rows(file)
    if not rows:
        raise UsageError(f"{file} has no rows; each begins with [[row]]")
    return rows


def _row_faults(rows: tuple[CatalogRow, ...], file: str, settings: Settings) -> list[str]:
    path = user_rows.user_rows_path(settings.words)
    beside = () if Path(file).absolute() == path.absolute() else user_rows.read_user_rows(path)
    known = catalog_files.load_failures()
    return list(user_rows.find_faults(rows, type(known)((*known.rows, *beside), tuple(known.classes.values()))))


def _check_rows(args: argparse.Namespace, settings: Settings) -> int:
    rows = _read_rows(args.file, user_rows.user_rows_path(settings.words))
    faults = _row_faults(rows, args.file, settings)
    print("\n".join(faults) or f"{counted_noun(len(rows), 'row')}, nothing wrong")
    return FAULTY if faults else 0


def _add_rows(args: argparse.Namespace, settings: Settings) -> int:
    path = user_rows.user_rows_path(settings.words)
    rows = _read_rows(args.file, path)
    if Path(args.file).absolute() == path.absolute():
        raise UsageError(f"{path} is your catalog already; holdfast catalog check {path} checks it")
    known = {(row.klass, row.pattern, row.code) for row in user_rows.read_user_rows(path)}
    new = tuple(row for row in rows if (row.klass, row.pattern, row.code) not in known)
    if faults := _row_faults(new, args.file, settings):
        print("\n".join(faults), file=sys.stderr)
        print(f"nothing was added to {path}", file=sys.stderr)
        return FAULTY
    user_rows.add_rows(new, path)
    if proposed := user_rows.list_proposals(path).get(args.file):
        proposed.unlink()
    print(f"added {counted_noun(len(new), 'row')} to {path}" if new else f"{path} has all of these rows already")
    return 0


def _propose_row(args: argparse.Namespace, settings: Settings) -> int:
    line = sys.stdin.readline() if args.line == "-" else args.line
    text = Masker(hosts=False)(" ".join(said.text for said in parse_lines([(0, line.strip())], 0, None)))
    row = CatalogRow(
        klass=args.klass,
        pattern=regex_safety.pattern_from_line(text),
        weight=5,
        sample=text,
        source="proposed by hand",
    )
    if faults := _row_faults((row,), "", settings):
        raise UsageError(faults[0])
    name = user_rows.propose_row(row, user_rows.user_rows_path(settings.words))
    print(f"{user_rows.format_row(row)}\nproposed as {name}; accept it with: holdfast catalog add {name}")
    return 0


def _reject_row(args: argparse.Namespace, settings: Settings) -> int:
    file = user_rows.list_proposals(user_rows.user_rows_path(settings.words)).get(args.id)
    if file is None:
        raise UsageError(f"there is no proposal '{args.id}'; holdfast catalog ls shows what is proposed")
    file.unlink()
    print(f"removed the proposal {args.id}")
    return 0


def _correct_failure(args: argparse.Namespace, settings: Settings) -> int:
    if args.klass not in {klass.klass for klass in catalog_files.load_classes()}:
        raise UsageError(f"there is no class '{args.klass}'; holdfast catalog ls --all shows them")
    lines = read_telling_lines_of(find_logs(None, args.logs)[0])
    if not lines:
        raise UsageError("these logs have no line by which the failure could be known again")
    note = make_masker(hosts=False)(" ".join(args.note.split()))[:_NOTE_CHARS]
    failure = PastCase(lines=lines, klass=args.klass, said_by="person", at=time.time(), note=note)
    id = PastCases(user_rows.past_cases_path()).keep_case(failure)
    print(f"kept as {id}: a failure like this one is {args.klass}; it is known by {counted_noun(len(lines), 'line')}:")
    print("\n".join(f"  {strip_controls(line)}" for line in lines[:_SHOWN_LINES]))
    return 0


def _list_past(args: argparse.Namespace, settings: Settings) -> int:
    path = user_rows.past_cases_path()
    failures = PastCases(path).read_all()
    if args.json:
        print(msgspec.json.encode(failures).decode())
        return 0
    for past in failures:
        said = "; ".join(filter(None, (past.note, past.outcome))) or "; ".join(past.lines[:1])
        print(strip_controls(f"{past.id}  {past.klass:<26} {past.said_by:<6} {past.times}x  {said}"))
    print(f"{counted_noun(len(failures), 'past failure')} in {path}")
    return 0
