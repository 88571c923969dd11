"""`holdfast trace`: where all processes of a job are now, who is missing from which collective, and a picture of it."""

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

from holdfast.cli import flame, runs
from holdfast.cli.api import ask
from holdfast.cli.flagtable import UsageError
from holdfast.cli.parsing import CommandParser
from holdfast.cli.wording import counted
from holdfast.controller.api import Traced
from holdfast.core.diagnose.stacks import STOPPED, Naming, mains_of, moved, ranks_said, vote
from holdfast.core.diagnose.tree import Branch, grow, ways
from holdfast.core.diagnose.waits import waits_of
from holdfast.core.plain import plain_tree
from holdfast.model.stacks import Process
from holdfast.wire.controller_call import NotRunning

_ROUND_S = 1.0  # between rounds
_AGAIN_S = 1.2  # until a second look; flight records of ranks are up to a second old
_ROAD_S = 5.0
_STANDING = ("stopped", "gone", "silent")  # seen of the rank itself, whatever the others do
_STATES = {"D": "in the kernel", "T": "stopped", "t": "stopped", "X": "gone", "Z": "ended"}


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    try:
        if not 1 <= args.rounds <= 100 or not 0 < args.deadline <= 60:
            raise UsageError("--rounds takes 1 to 100, --deadline seconds above 0 and up to 60")
        run_dir = runs.looked_at(args)
        rounds = [_ask(run_dir, args)]
        for _ in range(args.rounds - 1):
            time.sleep(_ROUND_S)
            rounds.append(_ask(run_dir, args))
        if len(rounds) == 1 and rounds[0].naming.ranks and rounds[0].naming.how not in _STANDING:
            step = _step(run_dir)
            time.sleep(_AGAIN_S)
            later = _ask(run_dir, args)
            named = find_stopped(later) or acquitted(rounds[0], later, _step(run_dir) - step)
        else:
            voted = vote([r.naming for r in rounds]) if len(rounds) > 1 else rounds[0].naming
            named = find_stopped(rounds[-1]) or voted
        if args.svg:
            _write(Path(args.svg), picture(rounds[-1], named))
    except (UsageError, NotRunning) as e:
        print(f"holdfast trace: {e}", file=sys.stderr)
        return 2 if isinstance(e, UsageError) else 1
    if args.json:
        print(msgspec.json.encode({"naming": named, "rounds": rounds}).decode())
    else:
        Console(markup=False, highlight=False, soft_wrap=True).print(render(rounds[-1], named))
    return 0


def find_stopped(found: Traced) -> Naming | None:
    """Who is stopped now: a fact, whatever was seen before and whatever the others do, be it every rank."""
    stopped = {p.rank: p.node for p in mains_of(found.traces).values() if p.state in STOPPED}
    if found.naming.how == "stopped" or not stopped:
        return found.naming if found.naming.how == "stopped" else None
    ranks, nodes = tuple(sorted(stopped)), tuple(sorted(set(stopped.values())))
    reason = f"{ranks_said(ranks)} {'is' if len(ranks) == 1 else 'are'} stopped, and no rank runs"
    return Naming(ranks=ranks, nodes=nodes, wide=nodes, how="stopped", hard=True, reason=reason)


def _step(run_dir: Path) -> int:
    status: dict[str, Any] = ask(run_dir, "/api/v1/status")
    return int(status["step"])


def acquitted(found: Traced, later: Traced, steps: int) -> Naming:
    """Whoever is last at a moment keeps nobody waiting in a job that goes on: one that makes steps, or whose accused
    came to further collectives."""
    motions = moved(found.traces, later.traces)
    accused = [motions[rank].collectives for rank in found.naming.ranks if rank in motions]
    if steps <= 0 and not (accused and all(accused)):
        return found.naming
    did = f"it made {counted(steps, 'step')}" if steps > 0 else f"its ranks came to {sum(accused)} more collectives"
    return Naming(
        reason=f"the job goes on, {did} while it was looked at; --rounds 10 finds who is late more often than others",
        clusters=found.naming.clusters,
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="holdfast trace", description="Show where all processes of a job are now.")
    runs.add_run(parser)
    parser.add_argument("--native", action="store_true", help="frames of C and C++ too; stops each rank for a moment")
    parser.add_argument("--rounds", type=int, default=1, help="look this often, and name who stands out in most rounds")
    parser.add_argument("--deadline", type=float, default=5.0, metavar="S", help="for nodes to answer (default: 5)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--svg", metavar="FILE", help="write a picture: frames as boxes, as wide as ranks are in them")
    return parser


def _ask(run_dir: Path, args: argparse.Namespace) -> Traced:
    body: dict[str, Any] = {"deadline_s": args.deadline, "native": args.native}
    found = ask(run_dir, "/api/v1/trace", body, args.deadline + _ROAD_S)
    return msgspec.convert(plain_tree(found), Traced)  # names of functions and threads are the script's own


def _write(path: Path, svg: str) -> None:
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror}") from None


def picture(found: Traced, named: Naming) -> str:
    root = grow(p for trace in found.traces for p in trace.processes if not p.child)
    return flame.draw(root, _headline(named), frozenset(named.ranks))


def render(found: Traced, named: Naming) -> Group:
    """One screen: whom the others wait for, where everybody is, who is missing from what, what could not be seen."""
    processes = [p for trace in found.traces for p in trace.processes]
    took_s = max((trace.took_s for trace in found.traces), default=0.0)
    size = f"{counted(len(found.traces), 'node')}, {counted(len(processes), 'process')}, {took_s:.2f} s"
    parts: list[Text | Tree | Table] = [Text(_headline(named), style="bold red" if named.ranks else "bold green")]
    if named.group:
        parts.append(Text(f"  all in parallel group {named.group}: nodes {', '.join(named.wide)}"))
    parts.append(_tree(f"main threads ({size})", grow(p for p in processes if not p.child), set(named.ranks)))
    if any(p.child and p.threads for p in processes):
        parts.append(_tree("children", grow(p for p in processes if p.child), set(named.ranks)))
    parts += _missing(found)
    parts += [Text(line, style="yellow") for line in _oddities(found)]
    return Group(*parts)


def _headline(named: Naming) -> str:
    if not named.ranks:
        return f"nobody stands out: {named.reason}"
    sure = ", for certain" if named.hard else ""
    return (
        f"{ranks_said(named.ranks)} on {', '.join(named.nodes) or 'unknown nodes'} ({named.how}{sure}): {named.reason}"
    )


def _tree(title: str, root: Branch, suspects: set[int]) -> Tree:
    tree = Tree(Text(title, style="dim"), guide_style="dim")
    if not root.below:
        tree.add(Text("no frames"))
    ahead = [(tree, root)]
    while ahead:
        trunk, branch = ahead.pop()
        for way, end in ways(branch):
            ahead.append((trunk.add(_label(way, end, suspects)), end))
    return tree


def _label(way: list[str], end: Branch, suspects: set[int]) -> Text:
    ranks = sorted(set(end.ranks))
    guilty = suspects and suspects.issuperset(ranks)
    text = Text(f"{ranks_said(ranks)}: ", style="bold red" if guilty else "bold")
    text.append("\n".join(way), style="red" if guilty else "not bold")
    if end.here and end.below:
        text.append(f"\n(here: {ranks_said(sorted(set(end.here)))})", style="dim")
    return text


def _missing(found: Traced) -> list[Text | Tree | Table]:
    waiting = waits_of([flight for trace in found.traces for flight in trace.flights])
    if not waiting.missing:
        return []
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("collective", "group", "entered by", "missing"):
        table.add_column(column, vertical="top")
    for m in waiting.missing:
        table.add_row(f"{m.op} {m.seq}", m.group, ranks_said(m.inside), Text(ranks_said(m.ranks), style="red"))
    return [table]


def _oddities(found: Traced) -> list[str]:
    lines = [f"{trace.node}: {trace.error}" for trace in found.traces if trace.error]
    odd = [p for trace in found.traces for p in trace.processes if p.error or p.state in _STATES]
    return lines + [f"{_who(p)}: {', '.join(w for w in (_STATES.get(p.state, ''), p.error) if w)}" for p in odd]


def _who(process: Process) -> str:
    child = f"child {process.name} of " if process.child else ""
    return f"{child}rank {process.rank} on {process.node} (pid {process.pid})"
