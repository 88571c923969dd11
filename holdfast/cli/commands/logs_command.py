"""`holdfast logs` and `holdfast attach`: show what the ranks of a run print, from any terminal."""

import argparse
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from holdfast.cli.run_dirs import run_directory, run_liveness, run_selection
from holdfast.cli.run_dirs.run_continuation import RunContinuation
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.rank_console import (
    Console,
    ConsoleStyle,
    list_generations,
    list_ranks,
    shown_line,
    write_all,
)
from holdfast.core.rank_ranges import format_ranks
from holdfast.linux.regular_files import open_file
from holdfast.wire import run_and_node_specs
from holdfast.wire.run_and_node_specs import RunEnd, RunSpec

_LOOK_S = 0.1
_LINES = 100
_LAST_SAID = 5  # sentences of holdfast, of a run that has ended
_STREAMS = {"stdout": 1, "stderr": 2, "both": 3}


def main(argv: list[str]) -> int:
    attach = argv[0] == "attach"
    parser = _attach_parser() if attach else _make_parser()
    args = parser.parse_args(argv[1:])
    try:
        run_dir = run_selection.run_to_read(args)
        run = run_directory.read_spec(run_dir)
        if attach:
            return _attach_run(run_dir, run)
        return _show_logs(run_dir, run, args)
    except UsageError as e:
        print(f"holdfast {argv[0]}: {e}", file=sys.stderr)
        return 2


def _attach_parser() -> argparse.ArgumentParser:
    about = "Follow a run as the terminal that started it does: its ranks' output, and what holdfast says. "
    about += "Ctrl-C leaves it running. The exit code is the run's, if it ends meanwhile. "
    about += "Of a run that has ended: how, what holdfast said last, and the run's exit code."
    parser = CommandParser(prog="holdfast attach", description=about)
    run_selection.add_run_argument(parser)
    return parser


def _make_parser() -> argparse.ArgumentParser:
    about = "Show what ranks have printed. Their files are in the run's log directory, one folder for each rank."
    parser = CommandParser(prog="holdfast logs", description=about)
    run_selection.add_run_argument(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="keep following the output")
    parser.add_argument(
        "--rank", type=int, action="append", metavar="R", help="only this rank; repeatable (default: all)"
    )
    parser.add_argument("--generation", type=int, metavar="G", help="only this generation (default: the newest)")
    parser.add_argument("--stream", choices=_STREAMS, default="both", help="(default: both)")
    parser.add_argument(
        "-n", "--lines", type=int, default=_LINES, help=f"last lines of each file (default {_LINES}; 0: all)"
    )
    return parser


def _attach_run(run_dir: Path, run: RunSpec) -> int:
    ending = RunContinuation(run_dir, run, _tell)
    where = ""
    if run_directory.find_controller(run_dir) is None:
        if ending.is_over():
            return _tell_ending(run_dir, run)
        elsewhere = run_liveness.controller_elsewhere(run_dir)
        if elsewhere is None and not (run_dir / "exit.json").exists():
            raise UsageError(
                f"the run in {run_dir} {run_liveness.ending_text(run_dir)}; see holdfast report, or holdfast logs"
            )
        where = f", whose controller was last on {urlsplit(elsewhere.url).hostname}" if elsewhere else ""
    console = _log_console(run, run_dir / "said.log", frozenset(), _STREAMS["both"])
    console.skip_to_end()
    _tell(
        f"following {run.job.run_id}{where}; Ctrl-C leaves it running; earlier output: holdfast logs {run.job.run_id}"
    )
    if _follow_run(ending, console):
        return run_and_node_specs.read_json(run_dir / "exit.json", RunEnd).code
    _tell(f"the run continues; holdfast stop {run_dir} ends it")
    return 0


def _tell(text: str) -> None:
    print(f"holdfast attach: {text}", file=sys.stderr, flush=True)


def _tell_ending(run_dir: Path, run: RunSpec) -> int:
    """Print how the run has ended and what holdfast said last; return the run's exit code."""
    _tell(f"the run in {run_dir} {run_liveness.ending_text(run_dir)}")
    _show_end(run_dir / "said.log", _STREAMS["stderr"], b"", _LAST_SAID)
    _tell(f"earlier output: holdfast logs {run.job.run_id}; what it cost: holdfast report {run_dir}")
    return run_and_node_specs.read_json(run_dir / "exit.json", RunEnd).code


def _show_logs(run_dir: Path, run: RunSpec, args: argparse.Namespace) -> int:
    log_dir = Path(run.log_dir)
    there = list_generations(log_dir)
    if not there and (not args.follow or args.generation is not None):
        raise UsageError(f"no rank has printed anything yet in {log_dir}")
    if args.generation is not None and args.generation not in there:
        known = f"generation{'s' if there[1:] else ''} {', '.join(map(str, there))}"
        raise UsageError(f"there is no generation {args.generation} in {log_dir}; it has {known}")
    console = _log_console(run, Path(os.devnull), frozenset(args.rank or ()), _STREAMS[args.stream])
    console.skip_to_end()
    if there:
        shown = args.generation if args.generation is not None else there[-1]
        _show_ends(log_dir / f"gen-{shown}", args)
    if args.follow:
        _follow_run(RunContinuation(run_dir, run, _note_continuation), console)
    return 0


def _show_ends(folder: Path, args: argparse.Namespace) -> None:
    """Print the last lines of each file, rank by rank."""
    ranks = list_ranks(folder)
    if strange := sorted(set(args.rank or ()) - set(ranks)):
        raise UsageError(f"there is no rank {strange[0]} in {folder}; it has {format_ranks(ranks)}")
    for rank in args.rank or ranks:
        for name, fd in (("stdout", 1), ("stderr", 2)):
            if fd & _STREAMS[args.stream]:
                _show_end(folder / f"rank-{rank}" / f"{name}.log", fd, f"[rank {rank}] ".encode(), args.lines)


def _show_end(path: Path, fd: int, prefix: bytes, count: int) -> None:
    lines: deque[tuple[bytes, Path]] = deque(maxlen=count or None)
    for one in (path.with_name(f"{path.name}.1"), path):  # what was rotated away comes before
        try:
            lines.extend((line, one) for line in _read_lines(one))
        except FileNotFoundError:
            continue
        except OSError as e:
            print(f"holdfast: cannot read {one}: {e.strerror}", file=sys.stderr, flush=True)
    for line, one in lines:
        write_all(fd, prefix + shown_line(line.rstrip(b"\r\n").rpartition(b"\r")[2], one) + b"\n")


def _read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines that a file has now: a rank may write faster than we read."""
    with open_file(path) as file:
        left = os.fstat(file.fileno()).st_size
        while line := file.readline(left):
            yield line
            left -= len(line)


def _log_console(run: RunSpec, said: Path, ranks: frozenset[int], streams: int) -> Console:
    style = ConsoleStyle(
        nproc=run.nproc,
        shown=lambda local: streams,
        ranks=ranks,
        role=run.entry.role,
        bytes_s=run.settings.logs.console_bytes_s,
    )
    return Console(Path(run.log_dir), style, said)


def _note_continuation(text: str) -> None:
    print(f"holdfast logs: {text}", file=sys.stderr, flush=True)


def _follow_run(ending: RunContinuation, console: Console) -> bool:
    """Show output until the run ends or a signal comes. Return True if the run has ended."""
    left: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: left.append(number))
    while not left:
        ended = ending.is_over()
        console.show_new_output()
        if ended:
            console.drain_output()
            return True
        time.sleep(_LOOK_S)
    return False
