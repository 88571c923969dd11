"""`holdfast trace`: shows the stacks of all processes of a job, and which ranks are missing from which collective."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from holdfast.cli.run_dirs import run_selection
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal import flame_graph_svg
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.output_file import replace_file
from holdfast.cli.terminal.quantity_text import counted_noun
from holdfast.controller.api_description import JobStacks
from holdfast.core.diagnose.blocking_ranks import (
    STANDING,
    STOPPED,
    BlockingRanks,
    acquit_within_step,
    training_processes,
    vote_rounds,
)
from holdfast.core.diagnose.rank_motion import find_motion
from holdfast.core.diagnose.stack_tree import StackBranch, grow_tree, list_branches
from holdfast.core.diagnose.wait_graph import build_wait_graph
from holdfast.core.rank_ranges import format_ranks
from holdfast.core.terminal_sanitizer import cut_words, strip_tree
from holdfast.model.rank_traces import Process
from holdfast.wire.controller_request import ControllerNotRunning

_ROUND_S = 1.0  # between rounds
_AGAIN_S = 1.2  # until a second look; flight records of ranks are up to a second old
_ROAD_S = 5.0
_WIDTH = 1 << 16
_FRAME_CHARS = 1000  # names of functions and files are the script's own
_STATES = {"D": "in the kernel", "T": "stopped", "t": "stopped", "X": "gone", "Z": "ended"}


class NoRankRunsError(Exception):
    """There are no processes to look at; the text says what the job does instead."""


def main(argv: list[str]) -> int:
    args = _make_parser().parse_args(argv)
    try:
        if not 1 <= args.rounds <= 100 or not 0 < args.deadline <= 60:
            raise UsageError("--rounds must be from 1 to 100, --deadline above 0 and at most 60 seconds")
        run_dir = run_selection.run_to_read(args)
        rounds = [_ask_trace(run_dir, args)]
        if not any(trace.processes or trace.error for trace in rounds[0].traces):
            raise NoRankRunsError(f"no rank runs now; the job is {_read_status(run_dir)['phase']}")
        for _ in range(args.rounds - 1):
            time.sleep(_ROUND_S)
            rounds.append(_ask_trace(run_dir, args))
        if len(rounds) == 1 and rounds[0].naming.ranks and rounds[0].naming.how not in STANDING:
            step = _read_step(run_dir)
            time.sleep(_AGAIN_S)
            later = _ask_trace(run_dir, args)
            named = find_stopped(later) or acquit_if_moving(rounds[0], later, _read_step(run_dir) - step)
            named = acquit_within_step(named, later.usual_step_s, later.since_step_s)
        else:
            voted = vote_rounds([r.naming for r in rounds]) if len(rounds) > 1 else rounds[0].naming
            named = find_stopped(rounds[-1]) or voted
        if args.svg:
            _write_svg(Path(args.svg), draw_svg(rounds[-1], named))
    except (UsageError, ControllerNotRunning, NoRankRunsError) as e:
        print(f"holdfast trace: {e}", file=sys.stderr)
        return 2 if isinstance(e, UsageError) else 1
    if args.json:
        print(msgspec.json.encode({"naming": named, "rounds": rounds}).decode())
    else:
        # A tree cuts its lines at the console's width and does not say so; a terminal wraps longer ones by itself.
        Console(markup=False, highlight=False, soft_wrap=True, width=_WIDTH).print(render_trace(rounds[-1], named))
    return 0


def find_stopped(found: JobStacks) -> BlockingRanks | None:
    """Return the stopped ranks as the ranks that block the job. Return None if no rank is stopped."""
    stopped = {p.rank: p.node for p in training_processes(found.traces).values() if p.state in STOPPED}
    if found.naming.how == "stopped" or not stopped:
        return found.naming if found.naming.how == "stopped" else None
    ranks, nodes = tuple(sorted(stopped)), tuple(sorted(set(stopped.values())))
    reason = f"{format_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} stopped, and no rank runs"
    return BlockingRanks(ranks=ranks, nodes=nodes, wide=nodes, how="stopped", hard=True, reason=reason)


def _read_status(run_dir: Path) -> dict[str, Any]:
    status: dict[str, Any] = ask_controller(run_dir, "/api/v1/status")
    return status


def _read_step(run_dir: Path) -> int:
    return int(_read_status(run_dir)["step"])


def acquit_if_moving(found: JobStacks, later: JobStacks, steps: int) -> BlockingRanks:
    """Return the ranks that block the job, or none if the job moved between two samples, `found` and `later`. It moved
    if it made steps (`steps`, counted in between), or if every accused rank entered more collectives."""
    motions = find_motion(found.traces, later.traces)
    accused = [motions[rank].collectives for rank in found.naming.ranks if rank in motions]
    if steps <= 0 and not (accused and all(accused)):
        return found.naming
    did = (
        f"it made {counted_noun(steps, 'step')}" if steps > 0 else f"its ranks entered {sum(accused)} more collectives"
    )
    return BlockingRanks(
        reason=f"the job is moving, {did} between two samples; --rounds 10 finds ranks that are often late",
        clusters=found.naming.clusters,
    )


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="holdfast trace", description="Show where all processes of a job are now.")
    run_selection.add_run_argument(parser)
    parser.add_argument("--native", action="store_true", help="include C and C++; stops each rank for a moment")
    parser.add_argument("--rounds", type=int, default=1, help="samples; names the rank that stands out most often")
    parser.add_argument("--deadline", type=float, default=5.0, metavar="S", help="wait for nodes (default 5)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--svg", metavar="FILE", help="write a flame graph; the more ranks in a frame, the wider it is")
    return parser


def _ask_trace(run_dir: Path, args: argparse.Namespace) -> JobStacks:
    body: dict[str, Any] = {"deadline_s": args.deadline, "native": args.native}
    found = ask_controller(run_dir, "/api/v1/trace", body, args.deadline + _ROAD_S)
    return msgspec.convert(strip_tree(found), JobStacks)  # names of functions and threads are the script's own


def _write_svg(path: Path, svg: str) -> None:
    try:
        replace_file(path, svg)
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror}") from None


def draw_svg(found: JobStacks, named: BlockingRanks) -> str:
    root = grow_tree(p for trace in found.traces for p in trace.processes if not p.child)
    return flame_graph_svg.draw_flame_graph(root, _headline_text(named), frozenset(named.ranks))


def render_trace(found: JobStacks, named: BlockingRanks) -> Group:
    """Render one screen: blocking ranks, stacks of all ranks, missing ranks of collectives, and errors."""
    processes = [p for trace in found.traces for p in trace.processes]
    took_s = max((trace.took_s for trace in found.traces), default=0.0)
    size = f"{counted_noun(len(found.traces), 'node')}, {counted_noun(len(processes), 'process')}, {took_s:.2f} s"
    parts: list[Text | Tree | Table] = [Text(_headline_text(named), style="bold red" if named.ranks else "bold green")]
    if named.group:
        parts.append(Text(f"  all in parallel group {named.group}: nodes {', '.join(named.wide)}"))
    parts.append(
        _stack_tree(f"main threads ({size})", grow_tree(p for p in processes if not p.child), set(named.ranks))
    )
    if any(p.child and p.threads for p in processes):
        parts.append(_stack_tree("children", grow_tree(p for p in processes if p.child), set(named.ranks)))
    parts += _missing_table(found)
    parts += [Text(line, style="yellow") for line in _oddity_lines(found)]
    return Group(*parts)


def _headline_text(named: BlockingRanks) -> str:
    if not named.ranks:
        return f"no rank stands out: {named.reason}"
    sure = ", for certain" if named.hard else ""
    nodes = ", ".join(named.nodes) or "unknown nodes"
    return f"{format_ranks(named.ranks)} on {nodes} ({named.how}{sure}): {named.reason}"


def _stack_tree(title: str, root: StackBranch, suspects: set[int]) -> Tree:
    tree = Tree(Text(title, style="dim"), guide_style="dim")
    if not root.below:
        tree.add(Text("no frames"))
    ahead = [(tree, root)]
    while ahead:
        trunk, branch = ahead.pop()
        for way, end in list_branches(branch):
            ahead.append((trunk.add(_branch_label(way, end, suspects)), end))
    return tree


def _branch_label(way: list[str], end: StackBranch, suspects: set[int]) -> Text:
    ranks = sorted(set(end.ranks))
    guilty = suspects and suspects.issuperset(ranks)
    text = Text(f"{format_ranks(ranks)}: ", style="bold red" if guilty else "bold")
    text.append("\n".join(cut_words(frame, _FRAME_CHARS) for frame in way), style="red" if guilty else "not bold")
    if end.here and end.below:
        text.append(f"\n(here: {format_ranks(sorted(set(end.here)))})", style="dim")
    return text


def _missing_table(found: JobStacks) -> list[Text | Tree | Table]:
    waiting = build_wait_graph([flight for trace in found.traces for flight in trace.flights])
    if not waiting.missing:
        return []
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("collective", "group", "entered by", "missing"):
        table.add_column(column, vertical="top")
    for m in waiting.missing:
        table.add_row(f"{m.op} {m.seq}", m.group, format_ranks(m.inside), Text(format_ranks(m.ranks), style="red"))
    return [table]


def _oddity_lines(found: JobStacks) -> list[str]:
    lines = [f"{trace.node}: {trace.error}" for trace in found.traces if trace.error]
    odd = [p for trace in found.traces for p in trace.processes if p.error or p.state in _STATES]
    told = [(p, "" if p.error.startswith("gone") else _STATES.get(p.state, "")) for p in odd]  # once is enough
    return lines + [f"{_process_name(p)}: {', '.join(w for w in (state, p.error) if w)}" for p, state in told]


def _process_name(process: Process) -> str:
    child = f"child {process.name} of " if process.child else ""
    return f"{child}rank {process.rank} on {process.node} (pid {process.pid})"
