"""`holdfast diagnose`: reads logs and says which failure they show, whose fault it is, and what to do next."""

import argparse
import contextlib
import io
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from holdfast.agent.rank import last_words
from holdfast.cli.run_dirs import run_directory, run_selection
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.flag_values import parse_settings as pairs
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.config import ConfigError, Settings, load
from holdfast.core.detect.crash import PROBABLY
from holdfast.journal.sqlite_journal import JournalError, SqliteJournal
from holdfast.logs import catalog_files
from holdfast.logs.log_diagnosis import ProcessEnds, RankLog, diagnose_logs, open_log, read_whole
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.diagnosis import Diagnosis

_LOGS = (".log", ".txt", ".out", ".err")  # in a folder
_FILES = 10_000
_SPOKEN_BYTES = 64 << 20  # between two words about how far it is
_BEFORE_S = 60.0  # the kernel may have told of a kill so long before ranks were seen to end
_ACTIONS = {
    "evict_and_restart": "take the machine out and restart on others",
    "retry": "restart as it is",
    "rollback_or_fix_code": "roll the last change of code back, or fix it: a restart alone would fail again",
    "fix_config": "change what is named below, then restart; no code needs to change",
    "wait_external": "wait until the service outside answers again, then restart",
    "run_diagnostics": "probe the machines first: the evidence does not single one out",
}


def main(argv: list[str]) -> int:
    args = _make_parser().parse_args(argv)
    try:
        found = _make_diagnosis(args)
    except (UsageError, ConfigError, JournalError) as e:
        print(f"holdfast diagnose: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"holdfast diagnose: cannot read {e.filename or 'a log'}: {e.strerror}", file=sys.stderr)
        return 2
    nothing = not found.confidence
    if args.json:
        print(encode_diagnosis(found))
    elif nothing:
        print(f"{found.explanation} {found.hint}")
    else:
        Console(markup=False, highlight=False).print(render_diagnosis(found))
    return 1 if nothing else 0


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="holdfast diagnose", description="Read logs and say which failure it was, whose, and what to do next."
    )
    what = "logs of ranks and kernels, a folder of them, - for standard input, or one run (directory, id, part of it)"
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
    run_dir = run_selection.find(args.run) if args.run else _named_run_dir(args.logs)
    logs, ends = _logs_of_run(run_dir) if run_dir else (_logs_of_files(args.logs), ProcessEnds())
    if args.exit_code is not None:
        ends = msgspec.structs.replace(ends, code=args.exit_code)
    found = diagnose_logs(logs, ends, catalog_files.load_failures(settings.words), _progress_printer())
    return _second_opinion(found, logs, settings) if args.ask else found


def _second_opinion(found: Diagnosis, logs: Sequence[RankLog], settings: Settings) -> Diagnosis:
    from holdfast.logs.second_opinion import ask_second_opinion  # and HTTP with it, for which nobody else has to wait

    return ask_second_opinion(found, read_whole(logs), settings, say=lambda text: print(text, file=sys.stderr))


def _named_run_dir(names: list[str]) -> Path | None:
    if not names:
        return run_directory.find_run_dir(None)
    if len(names) > 1 or names[0] == "-" or Path(names[0]).is_file():
        return None
    if Path(names[0]).is_dir() and not (Path(names[0]) / "run.json").exists():
        return None
    try:
        return run_selection.find(names[0])
    except run_selection.AmbiguousRun:
        raise
    except UsageError:
        raise UsageError(f"there is no file, folder or run called {names[0]}") from None


def _logs_of_files(names: list[str]) -> list[RankLog]:
    logs: list[RankLog] = []
    for name in names:
        path = Path(name)
        if name == "-":
            logs.append(_stdin_log())
        elif path.is_dir():
            below = (p for p in sorted(path.rglob("*")) if p.suffix in _LOGS and p.is_file())
            logs += [open_log(p) for p in itertools.islice(below, _FILES)]
        else:
            with path.open("rb"):  # better now than after minutes of reading others
                logs.append(open_log(path))
    if not logs:
        raise UsageError(f"there is no log ({', '.join(_LOGS)}) below {' or '.join(names)}")
    return logs


def _stdin_log() -> RankLog:
    """Copy standard input to a temporary file, because a log may be read twice."""
    kept = tempfile.NamedTemporaryFile()  # noqa: SIM115  # gone with the last who can open it
    shutil.copyfileobj(sys.stdin.buffer, kept, 1 << 20)
    kept.flush()
    return RankLog(open=lambda: open(kept.name, "rb"))


def _logs_of_run(run_dir: Path) -> tuple[list[RankLog], ProcessEnds]:
    """Return the logs of the newest generation in which a rank crashed, and how its ranks ended."""
    journal_path = run_dir / "journal.db"
    if not journal_path.exists():
        raise UsageError(f"{run_dir} has no journal yet; its controller has not started")
    with contextlib.closing(SqliteJournal(journal_path, read_only=True)) as journal:
        events = [entry.event for entry in journal.read()]
    crashes = [event for event in events if isinstance(event, Alarm) and event.kind is Kind.CRASH]
    if not crashes:
        raise UsageError(f"no rank of {run_dir} has failed; holdfast report shows what happened")
    generation = max(alarm.generation for alarm in crashes)
    last = [alarm for alarm in crashes if alarm.generation == generation]
    ends = ProcessEnds(
        codes={alarm.ranks[0]: alarm.code for alarm in last if alarm.ranks and alarm.code is not None},
        at={alarm.ranks[0]: alarm.at for alarm in last if alarm.ranks},
        starved=_is_oom_killed(events, last),
        pressed=next((text for alarm in last if (text := alarm.reason.partition(PROBABLY)[2].rstrip(")"))), ""),
    )
    here = last_words.rank_folder(run_directory.read_spec(run_dir).log_dir, generation, 0).parent
    logs = [open_log(path) for path in sorted(here.rglob("*.log"))]
    said = [line for alarm in last for line in alarm.evidence if not logs]  # they lie on other machines
    logs += [RankLog(open=lambda: io.BytesIO("\n".join(said).encode()))] if said else []
    return logs, ends


def _is_oom_killed(events: Sequence[object], last: Sequence[Alarm]) -> bool:
    """Whether the kernel reported that it killed these ranks for lack of memory."""
    since, ranks = min(alarm.at for alarm in last) - _BEFORE_S, {rank for alarm in last for rank in alarm.ranks}
    told = (e for e in events if isinstance(e, Alarm) and e.klass == "host_oom_kill" and PROBABLY not in e.reason)
    return any(event.at >= since and ranks & set(event.ranks) for event in told)


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


def render_diagnosis(found: Diagnosis) -> Group:
    head = Text.assemble((found.klass, "bold red"), f"  {found.title}  ", (f"({found.confidence:.0%} sure)", "dim"))
    facts = Table.grid(padding=(0, 2))
    who = f"rank {found.root_rank}" if found.root_rank is not None else ""
    for name, value in (
        ("whose fault", found.group),
        ("what to do", f"{found.action}: {_ACTIONS.get(found.action, '')}"),
        ("", found.hint),
        ("failed first", " ".join(filter(None, (who, found.node and f"on {found.node}", found.origin)))),
        ("why", found.explanation),
    ):
        if value:
            facts.add_row(Text(name, style="dim"), Text(value))
    lines = (Text(f"  {line}", overflow="ellipsis", no_wrap=True) for line in found.evidence)
    return Group(head, facts, Text("evidence" if found.evidence else "", style="dim"), *lines)
