"""`holdfast diagnose`: reads logs and says which failure they show, whose fault it is, and what to do next."""

import argparse
import atexit
import gc
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from holdfast.cli.run_dirs.local_run_list import is_own_run
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.flag_values import parse_settings as pairs
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.config import ConfigError, Settings, load
from holdfast.core.log_analysis.failure_catalog import UNKNOWN
from holdfast.logs import catalog_files
from holdfast.logs.learned_words import load_learned
from holdfast.logs.log_diagnosis import ProcessEnds, RankLog, diagnose_logs, open_log
from holdfast.logs.user_rows import past_cases_path
from holdfast.model.last_words_diagnosis import Diagnosis

_LOGS = (".log", ".txt", ".out", ".err")  # in a folder
_FILES = 10_000
_SPOKEN_BYTES = 64 << 20  # between two words about how far it is
_AGAIN = ": a restart alone would fail again"
_ACTIONS = {
    "evict_and_restart": "take the machine out and restart on others",
    "retry": "restart as it is",
    "rollback_or_fix_code": f"roll the last change of code back, or fix it{_AGAIN}",
    "fix_config": "change what is named below, then restart; no code needs to change",
    "wait_external": "wait until the service outside answers again, then restart",
    "run_diagnostics": "probe the machines first: the evidence does not single one out",
}


def main(argv: list[str]) -> int:
    atexit.register(gc.freeze)  # all goes with the process; to search it for garbage first would take a sixth longer
    args = _make_parser().parse_args(argv)
    try:
        found = _make_diagnosis(args)
    except (UsageError, ConfigError) as e:
        print(f"holdfast diagnose: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"holdfast diagnose: cannot read {e.filename or 'a log'}: {e.strerror}", file=sys.stderr)
        return 2
    nothing = not found.confidence and not found.verdict
    if args.json:
        print(encode_diagnosis(found))
    elif nothing:
        print(f"{found.explanation} {found.hint}")
    else:
        print_diagnosis(found)
    return 1 if nothing else 0


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="holdfast diagnose", description="Read logs and say which failure it was, whose, and what to do next."
    )
    what = "logs of ranks and kernels, pipes, folders of logs, - for standard input, or one run (directory, id, part)"
    parser.add_argument("logs", nargs="*", metavar="FILE", help=f"{what} (default: the newest run)")
    parser.add_argument("--run", metavar="RUN", help="run directory, or id or part of it, instead of files")
    parser.add_argument("--exit-code", type=int, metavar="N", help="exit code of the launcher, or of the only process")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--ask", action="store_true", help="ask the model at model.url if the rules are unsure")
    parser.add_argument("--config", metavar="FILE", help="settings: your own rows, a language model")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one setting")
    return parser


def _make_diagnosis(args: argparse.Namespace) -> Diagnosis:
    settings = load(args.config, pairs(args.set))
    if args.ask and not settings.model.url:
        raise UsageError("--ask needs an endpoint: give model.url and model.name with --set or in a --config file")
    if args.run and args.logs:
        raise UsageError(f"name files or a run, not both {args.logs[0]} and --run {args.run}")
    logs, ends = find_logs(args.run, args.logs)
    if args.exit_code is not None:
        ends = msgspec.structs.replace(ends, code=args.exit_code)
    known = catalog_files.load_failures(settings.words)
    found = diagnose_logs(logs, ends, known, _progress_printer(), load_learned())
    return _add_opinion(found, logs, settings, args.ask) if args.ask or past_cases_path().exists() else found


def find_logs(run: str | None, names: list[str]) -> tuple[list[RankLog], ProcessEnds]:
    """Return the logs of a run, or of the named files and folders; for a run, also how its ranks ended."""
    if run or not _are_files(names):
        return _logs_of_run(run, names)
    return _logs_of_files(names), ProcessEnds()


def _add_opinion(found: Diagnosis, logs: Sequence[RankLog], settings: Settings, ask: bool) -> Diagnosis:
    from holdfast.logs.opinion_choice import find_opinion  # for which nobody else has to wait

    return find_opinion(found, logs, settings, ask=ask, say=lambda text: print(text, file=sys.stderr)).diagnosis


def _are_files(names: list[str]) -> bool:
    """Return whether these names are log files or folders; False if they name a run, or if there are no names."""
    if not names or len(names) > 1 or names[0] == "-":
        return bool(names)
    is_run = os.path.exists(f"{names[0]}/run.json") or is_own_run(names[0])
    return os.path.exists(names[0]) and not is_run


def _logs_of_run(run: str | None, names: list[str]) -> tuple[list[RankLog], ProcessEnds]:
    # and HTTP, TLS and SQLite with them, for which nobody who names files has to wait
    from holdfast.cli.run_dirs import failed_run_logs, run_selection

    if run or not names:
        return failed_run_logs.read_failed_run(run_selection.find(run or None))
    return failed_run_logs.read_failed_run(failed_run_logs.find_run(names[0]))


def _logs_of_files(names: list[str]) -> list[RankLog]:
    logs: list[RankLog] = []
    for name in names:
        path = Path(name)
        if name == "-":
            logs.append(_copy_stream(sys.stdin.buffer))
        elif path.is_fifo():  # as `<(command)` is, and often /dev/stdin
            with path.open("rb") as pipe:
                logs.append(_copy_stream(pipe))
        elif path.is_dir():
            below = (p for p in sorted(path.rglob("*")) if p.suffix in _LOGS and p.is_file())
            logs += [open_log(p) for p in itertools.islice(below, _FILES)]
        elif path.is_file() or not path.exists():
            with path.open("rb"):  # better now than after minutes of reading others
                logs.append(open_log(path))
        else:
            raise UsageError(f"{name} is a socket or a device; give files, folders or pipes, or - for standard input")
    if not logs:
        raise UsageError(f"there is no log ({', '.join(_LOGS)}) below {' or '.join(names)}")
    return logs


def _copy_stream(stream: BinaryIO) -> RankLog:
    """Copy standard input or a pipe to a temporary file, because a log may be read twice."""
    kept = tempfile.NamedTemporaryFile()  # noqa: SIM115  # gone with the last who can open it
    shutil.copyfileobj(stream, kept, 1 << 20)
    kept.flush()
    return RankLog(open=lambda: open(kept.name, "rb"))


def _progress_printer() -> Callable[[int], None] | None:
    if not sys.stderr.isatty():
        return None
    told = 0

    def tell(seen: int) -> None:
        nonlocal told
        if seen - told >= _SPOKEN_BYTES or seen < told:
            told = seen
            print(f"\rread {seen >> 20} MiB", end="\r", file=sys.stderr, flush=True)

    return tell


def encode_diagnosis(found: Diagnosis) -> str:
    tree = msgspec.to_builtins(found)
    return msgspec.json.encode({"class": tree.pop("klass"), **tree}).decode()


def _fault_text(found: Diagnosis) -> str:
    if found.fault_known:
        return "not known" if found.group == "unknown" else found.group
    where = f"the log of the peer {found.peer}" if found.peer else "the logs of the other ranks"
    return f"not known from this log: look at {where}"


def _action_text(found: Diagnosis) -> str:
    if found.action == "run_diagnostics" and not found.fault_known:
        return "if the other logs show no cause either, probe the machines"
    text = _ACTIONS.get(found.action, "")
    return f"{text.removesuffix(_AGAIN)}; the job has gone on since" if found.went_on else text


def _class_text(found: Diagnosis) -> str:
    """Return the failure class as text. A class that was guessed from logs comes with the confidence of the guess."""
    if found.verdict and found.klass == UNKNOWN:
        return "nobody said why"
    return f"{found.title}: {found.klass}" if found.verdict else f"{found.klass}, {found.confidence:.0%} sure"


def print_diagnosis(found: Diagnosis) -> None:
    from rich.console import Group  # a sixth of this command's time, for which --json need not wait
    from rich.table import Table
    from rich.text import Text

    from holdfast.cli.terminal.command_output import make_output

    head = Text.assemble(
        (found.verdict or found.title or found.klass, "bold red"), (f"  ({_class_text(found)})", "dim")
    )
    facts = Table.grid(padding=(0, 2))
    who = f"rank {found.root_rank}" if found.root_rank is not None else ""
    for name, value in (
        ("whose fault", _fault_text(found)),
        ("what to do", f"{found.action}: {_action_text(found)}"),
        ("", found.hint),
        ("failed first", " ".join(filter(None, (who, found.node and f"on {found.node}", found.origin)))),
        ("why", found.explanation.removeprefix(f"The run found: {found.verdict}.").strip()),
    ):
        if value:
            facts.add_row(Text(name, style="dim"), Text(value))
    lines = (Text(f"  {line}", overflow="ellipsis", no_wrap=True) for line in found.evidence)
    shown = Group(head, facts, Text("evidence" if found.evidence else "", style="dim"), *lines)
    make_output().print(shown)
