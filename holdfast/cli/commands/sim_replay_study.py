"""`holdfast sim replay`: measures how reliably simulated replays find a faulty machine, and what they cost."""

import argparse

import msgspec
from rich.console import Console
from rich.table import Table

from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.core.replay.node_grid import UnfitError
from holdfast.sim.replay_study import CostCrossing, NamingRate, ReplaySetup, ReplayStudy, run_study

_PLAIN = ReplaySetup(launch_s=0.0, group_launch_s=0.0)
_MOST_NODES, _MOST = 100_000, 1_000_000
_CHANCES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
_NUMBERS = {
    "nodes": "nodes that train",
    "replica": "nodes of a whole replica of the model",
    "stages": "stages of its pipeline",
    "group": "nodes of a replay group, 0: as many as fit",
    "steps": "steps of one replay",
    "most": "repeats of a phase at most",
    "trials": "faults tried for each chance",
    "seed": "the same seed gives the same table",
}


def add_command(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    what = "name a faulty machine by replaying: dual-phase, and two halves with a referee, by how often the fault shows"
    parser = commands.add_parser("replay", help="find one faulty machine by replaying", description=what)
    for name, help in _NUMBERS.items():
        default = getattr(_PLAIN, name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{help} (default {default})")
    many = ",".join(f"{q:g}" for q in _CHANCES)
    said = f"how often the fault shows in a replay; one or more, by commas (default {many})"
    parser.add_argument("--q", default=many, metavar="Q[,Q...]", help=said)
    parser.add_argument("--confidence", type=float, default=_PLAIN.confidence, help="wanted (default 0.95)")
    parser.add_argument("--step-s", type=float, default=_PLAIN.step_s, help="seconds per step (default 10)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    setup, chosen = _make_setup(args)
    try:
        found = run_study(setup, chosen)
    except UnfitError as e:
        raise UsageError(str(e)) from None
    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        _show_study(found)
    return 0


def _make_setup(args: argparse.Namespace) -> tuple[ReplaySetup, tuple[float, ...]]:
    for name in _NUMBERS:
        least = 0 if name in ("group", "seed") else 1
        most = _MOST_NODES if name in ("nodes", "replica", "stages", "group") else _MOST
        if not least <= getattr(args, name) <= most:
            raise UsageError(f"--{name} must be at least {least} and at most {most:,}")
    try:
        chosen = tuple(float(word) for word in args.q.split(","))
    except ValueError:
        raise UsageError(f"--q {args.q}: write it as 0.5 or 1,0.5,0.2") from None
    if not all(1e-6 <= q <= 1 for q in chosen):
        raise UsageError("--q must be above 0, no less than 0.000001, and at most 1")
    if not 0 < args.confidence < 1:
        raise UsageError("--confidence must lie between 0 and 1")
    if not 0.01 <= args.step_s <= 86400:
        raise UsageError("--step-s must be between 0.01 and 86400")
    numbers = {name: getattr(args, name) for name in _NUMBERS}
    return ReplaySetup(**numbers, confidence=args.confidence, step_s=args.step_s), chosen


def _show_study(found: ReplayStudy) -> None:
    setup = found.setup
    left = f", {found.left_over} left over" if found.left_over else ""
    table = Table(
        title=f"{setup.nodes} nodes in {found.n} groups of {found.m}{left}; replays of {setup.steps} steps,"
        f" {setup.trials} faults for each q; costs in steps of {setup.step_s:g} s"
    )
    columns = ("q", "repeats", "dual: named", "reckoned", "steps", "with launches")
    for column in (*columns, "halves: named", "reckoned", "steps", "with launches"):
        table.add_column(column, justify="right")
    for line in found.lines:
        dual = (*_rate_texts(line.dual), f"{line.dual_steps:.1f}", f"{line.dual_cost:.1f}")
        halves = (*_rate_texts(line.halves), f"{line.halves_steps:.1f}", f"{line.halves_cost:.1f}")
        table.add_row(f"{line.q:g}", str(line.repeats), *dual, *halves)
    Console(width=140, highlight=False).print(table)
    if any(not rate.agrees for line in found.lines for rate in (line.dual, line.halves)):
        print("(!): outside of the interval of 95 %, as one in twenty may well be")
    two = found.two
    print(f"two faulty at once: both in the set in {two.held} of {two.trials}, {two.suspects:.1f} suspects on average")
    print(f"a launch takes {setup.launch_s:g} s, of one group {setup.group_launch_s:g} s (modelled)")
    for crossing in found.crossings:
        print(f"replays of {crossing.steps} step{'s' * (crossing.steps > 1)}: {_crossing_text(crossing)}")


def _rate_texts(rate: NamingRate) -> tuple[str, str]:
    mark = "" if rate.agrees else " (!)"
    return f"{rate.found / rate.trials:.3f} [{rate.low:.3f}, {rate.high:.3f}]", f"{rate.reckoned:.3f}{mark}"


def _crossing_text(crossing: CostCrossing) -> str:
    steps = "by steps alone halves always cost less"
    if crossing.by_steps is not None:
        steps = f"by steps alone halves cost less below q = {crossing.by_steps:.2f}"
    launches = "also with launches"
    if crossing.with_launches is not None:
        launches = f"with launches below q = {crossing.with_launches:.2f}, above it the dual phase does"
    return f"{steps}; {launches}"
