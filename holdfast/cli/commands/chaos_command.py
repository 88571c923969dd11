"""`holdfast chaos`: injects faults into a job, records each as ground truth, and checks how the job handles them."""

import argparse
import shlex
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from holdfast.chaos import lab_launch, scenario
from holdfast.chaos.fault_catalog import KINDS
from holdfast.chaos.injection_records import CannotInject, SkippedFault
from holdfast.chaos.job_observer import JobObserver
from holdfast.chaos.scenario import BadScenario, Scenario
from holdfast.chaos.striker import NAME, Striker, is_good
from holdfast.chaos.undo_guard import UndoGuard
from holdfast.cli.run_dirs import run_dir_creation, run_directory, run_liveness, run_selection
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser

_NOTHING = 3
_CODES = """Exit code 0: holdfast noticed every visible fault, named the right node, and the job came back each time;
1: it did not; 2: the command line or the scenario is wrong; 3: no fault was injected."""


def main(argv: list[str]) -> int:
    args = _make_parser().parse_args(argv)
    try:
        match args.what:
            case "list":
                return _list_kinds(args.json)
            case "run":
                return _strike_job(scenario.read_scenario(args.scenario), args)
            case _:
                return _run_random(args)
    except (BadScenario, UsageError, CannotInject) as e:
        print(f"holdfast chaos: {e}", file=sys.stderr)
        return 2


def _run_random(args: argparse.Namespace) -> int:
    code = _strike_job(scenario.draw_scenario(args.seed, args.minutes, _kind_weights(args.kinds)), args)
    if code == 1:
        words = ["random", "--seed", str(args.seed), "--minutes", f"{args.minutes:g}"]
        words += ["--kinds", args.kinds] if args.kinds else []
        words += [*filter(None, [args.run]), *(["--yes"] if args.yes else [])]
        _say(f"to repeat this: holdfast chaos {shlex.join(words)}")
    return code


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="holdfast chaos", description="Inject faults into a job and check what follows.", epilog=_CODES
    )
    what = parser.add_subparsers(dest="what", required=True)
    shown = what.add_parser("list", help="every kind of fault, and whether it can be injected here")
    shown.add_argument("--json", action="store_true", help="for programs")
    run = what.add_parser("run", help="the faults of a file, in order")
    run.add_argument("scenario", type=Path, metavar="SCENARIO.toml")
    walk = what.add_parser("random", help="random faults; the same seed draws the same ones")
    walk.add_argument("--seed", type=int, required=True)
    walk.add_argument("--minutes", type=float, required=True)
    walk.add_argument("--kinds", default="", metavar="KIND,...", help="draw only from these")
    for one in (run, walk):
        run_selection.add_run_argument(one, order=True)
        one.add_argument("--yes", action="store_true", help="do not ask for confirmation")
        one.add_argument("--json", action="store_true", help="print results as JSON lines")
        one.epilog = _CODES
    return parser


def _kind_weights(kinds: str) -> dict[str, int] | None:
    named = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    if strange := [kind for kind in named if kind not in KINDS]:
        raise UsageError(f"--kinds: there is no fault {', '.join(strange)}; holdfast chaos list shows all")
    return dict.fromkeys(named, 1) or None


def _list_kinds(as_json: bool) -> int:
    rows = [
        {"kind": k.name, "what": k.what, "takes": k.takes, "alarms": k.alarms, "needs": k.needs, "lacks": k.lacks()}
        for k in KINDS.values()
    ]
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return 0
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("kind", "what it does", "alarm", "here"):
        table.add_column(head)
    for kind in KINDS.values():
        here = kind.lacks() or (f"if the job has {kind.needs}" if kind.needs else "yes")
        table.add_row(kind.name, kind.what, " or ".join(kind.alarms) or f"none: {kind.blind}", here)
    Console(highlight=False, soft_wrap=True).print(table)
    return 0


def _strike_job(asked: Scenario, args: argparse.Namespace) -> int:
    if asked.job is not None:
        if name := run_selection.named_run(args):
            raise UsageError(f"{args.scenario} starts its own job; drop {name}")
        folder = run_directory.holdfast_home() / "chaos" / run_dir_creation.new_run_id()
        _say(f"starting a job for this scenario in {folder}")
        with UndoGuard() as guard, lab_launch.run_lab_job(asked.job, folder) as job:
            return _run_scenario(asked, Striker(job.observe_job(), guard, asked.seed, _say), args.json, job.links)
    run_dir = run_selection.run_to_change(args)
    if run_directory.find_controller(run_dir) is None:
        raise UsageError(f"the run in {run_dir} {run_liveness.ending_text(run_dir)}")
    if not args.yes and not _is_agreed(asked, run_dir):
        print("holdfast chaos: nothing was injected", file=sys.stderr)
        return 2
    with UndoGuard() as guard:
        return _run_scenario(asked, Striker(JobObserver(run_dir), guard, asked.seed, _say), args.json)


def _is_agreed(asked: Scenario, run_dir: Path) -> bool:
    print(f"The job in {run_dir} will suffer:")
    for line in scenario.fault_lines(asked):
        print(f"  {line}")
    if not sys.stdin.isatty():
        raise UsageError("this injects faults into a running job, and no terminal can confirm it; give --yes")
    return input("Type yes to continue: ").strip().lower() == "yes"


def _run_scenario(asked: Scenario, striker: Striker, as_json: bool, links: Path | None = None) -> int:
    striker.scene.links = links
    results = striker.run(asked)
    skipped = [line for line in striker.lines if isinstance(line, SkippedFault)]
    if as_json:
        for line in striker.lines:
            print(msgspec.json.encode(line).decode())
    _say(f"{len(results)} injected, {len(skipped)} skipped; truth and results: {striker.scene.sight.run_dir / NAME}")
    if not results:
        return _NOTHING
    return 0 if is_good(results) else 1


def _say(text: str) -> None:
    print(f"holdfast chaos: {text}", file=sys.stderr, flush=True)
