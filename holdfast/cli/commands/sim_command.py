"""`holdfast sim`: runs the real decider in virtual time, with modelled delays and with faults drawn from a seed."""

import argparse
import re
import shlex
import sys
from pathlib import Path

import msgspec

from holdfast.cli.commands import sim_dst, sim_replay_study, sim_scale
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.quantity_text import duration_text
from holdfast.core.record.job_account import TimeUse
from holdfast.core.record.job_report import report_of
from holdfast.journal.journal_errors import JournalError
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.sim.checked_seed_run import SimResult, simulate
from holdfast.sim.fault_source import DAY_S, HARSH, FaultRates, NodeCut, NodeLoss, RankCrash, SimFault
from holdfast.sim.invariants import UnsafeError
from holdfast.sim.job_world import SimSetup
from holdfast.sim.scale.plots import PlotError

UNSAFE = 1
_MOST = 10_000  # nodes whose every event is played
_LIMITS = {
    "nodes": (1, _MOST),
    "nproc": (1, 1024),
    "standbys": (0, _MOST),
    "shrink": (0, _MOST),
    "save_steps": (1, 1_000_000_000),
}
_USUAL = {"nodes": 8, "standbys": 1, "shrink": 0, "days": 1.0, "save_steps": 100}
_FAULTS = {"crash": RankCrash, "loss": NodeLoss, "cut": NodeCut}
_CHANCES = {
    "loss": "nodes lost, per node and day",
    "crash": "ranks that end badly, per node and day",
    "defect": "nodes that begin to fail again and again, per node and day",
    "cut": "nodes out of reach for a while, per node and day",
    "fleet_fails": "chance that the fleet has no node to give",
    "dud": "chance that an acquired node never reports",
    "launch_fails": "chance that a launch fails on one node",
    "stop_fails": "chance that one node fails to stop its ranks",
}


def main(argv: list[str]) -> int:
    args = _make_parser().parse_args(argv)
    try:
        if args.command == "replay":
            return sim_replay_study.run(args)
        if args.command == "dst":
            return sim_dst.run(args)
        if args.command == "validate":
            return sim_scale.run_validation(args)
        return sim_scale.run_policies(args) if args.gpus is not None else _run_simulation(_make_setup(args), args)
    except (UsageError, JournalError, PlotError) as e:
        print(f"holdfast sim: {e}", file=sys.stderr)
        return 2


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="holdfast sim", description="Simulate jobs and their faults in virtual time.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    what = "simulate a job with faults: is it always safe, does it recover, and what do the faults cost?"
    run = commands.add_parser("run", help="simulate one job", description=what)
    run.add_argument("--seed", type=int, default=1, help="the same seed gives the same journal (default 1)")
    run.add_argument("--nodes", type=int, help="nodes that train (default 8)")
    run.add_argument("--nproc", type=int, default=8, help="ranks on each of them (default 8)")
    run.add_argument("--standbys", type=int, help="standbys (default 1; with --gpus enough for 99 %% of days)")
    run.add_argument("--shrink", type=int, help="how many nodes fewer the job may run on (default 0)")
    run.add_argument("--days", type=float, help="days with faults, then it must recover (default 1; with --gpus 90)")
    run.add_argument("--step-s", type=float, default=10.0, help="seconds per step (default 10)")
    run.add_argument("--save-steps", type=int, help="steps between checkpoints (default 100)")
    run.add_argument("--join", action="store_true", help="the fleet cannot acquire nodes; lost ones are repaired")
    run.add_argument("--harsh", action="store_true", help="many faults of every kind a day, where no flag sets a rate")
    for name, help in _CHANCES.items():
        usual, harsh = getattr(FaultRates(), name), getattr(HARSH, name)
        said = f"{help} (default {usual:g}, harsh {harsh:g})"
        run.add_argument(_flag_name(name), type=float, metavar="RATE", help=said)
    one = "one more fault: crash, loss or cut, after AT seconds"
    run.add_argument("--fault", action="append", default=[], metavar="AT:KIND[:NODE]", help=one)
    run.add_argument("--journal", type=Path, metavar="FILE", help="keep its journal in this file")
    run.add_argument("--json", action="store_true", help="print the result as JSON")
    sim_scale.add_flags(run)
    sim_replay_study.add_command(commands)
    sim_dst.add_command(commands)
    sim_scale.add_validate_command(commands)
    return parser


def _make_setup(args: argparse.Namespace) -> SimSetup:
    for name in ("failures", "policy", "ablate", "seeds", "rate", "no_updates", "ask_h", "plot"):
        if getattr(args, name) not in (None, False):
            raise UsageError(f"{_flag_name(name)} needs --gpus")
    for name, usual in _USUAL.items():
        setattr(args, name, usual if getattr(args, name) is None else getattr(args, name))
    for name, (least, most) in _LIMITS.items():
        if not least <= getattr(args, name) <= most:
            raise UsageError(
                f"{_flag_name(name)} must be at least {least} and at most {most:,}; --gpus is for larger jobs"
            )
    if not 0 < args.days <= 3650:
        raise UsageError("--days must be above 0 and at most 3650")
    if not 0.01 <= args.step_s <= 86400:
        raise UsageError("--step-s must be between 0.01 and 86400")
    if args.shrink >= args.nodes:
        raise UsageError("--shrink must be below --nodes: at least one node must train")
    given = {name: getattr(args, name) for name in _CHANCES if getattr(args, name) is not None}
    for name, rate in given.items():
        if not 0 <= rate <= 1000:
            raise UsageError(f"{_flag_name(name)} must be between 0 and 1000")
    return SimSetup(
        seed=args.seed,
        nodes=args.nodes,
        nproc=args.nproc,
        standbys=args.standbys,
        shrink=args.shrink,
        days=args.days,
        step_s=args.step_s,
        save_steps=args.save_steps,
        acquire=not args.join,
        rates=msgspec.structs.replace(HARSH if args.harsh else FaultRates(), **given),
        script=tuple(_parse_fault(text, args.days) for text in args.fault),
    )


def _parse_fault(text: str, days: float) -> tuple[float, SimFault]:
    said, _, rest = text.partition(":")
    kind, _, node = rest.partition(":")
    try:
        at, fault = float(said), _FAULTS[kind](node=node)
    except (ValueError, KeyError):
        raise UsageError(f"--fault {text}: write it as SECONDS:KIND or SECONDS:KIND:NODE, like 3600:loss:n3") from None
    if not 0 <= at <= days * DAY_S:
        raise UsageError(f"--fault {text}: the seconds must be from 0 to the {days * DAY_S:g} of --days")
    if node and not re.fullmatch("n[0-9]+", node):
        raise UsageError(f"--fault {text}: nodes are named n0, n1 and so on")
    return at, fault


def _run_simulation(setup: SimSetup, args: argparse.Namespace) -> int:
    journal = _new_journal(args.journal) if args.journal else None
    try:
        result = simulate(setup, lambda entry: journal.append(entry, durable=False)) if journal else simulate(setup)
    except UnsafeError as e:
        print(f"holdfast sim: {e}\nto see it again: {repeat_command(setup)}", file=sys.stderr)
        return UNSAFE
    finally:
        if journal:
            journal.close()
    print(_result_json(result) if args.json else _result_text(setup, result))
    return 0


def _new_journal(path: Path) -> SqliteJournal:
    if path.exists():
        raise UsageError(f"{path} exists already; give another --journal")
    return SqliteJournal(path)


def repeat_command(setup: SimSetup) -> str:
    """Return the command that repeats a simulation."""
    plain = SimSetup(seed=0, nodes=0)
    words = ["holdfast", "sim", "run", "--seed", str(setup.seed), "--nodes", str(setup.nodes)]
    for name in ("nproc", "standbys", "shrink", "days", "step_s", "save_steps"):
        if getattr(setup, name) != getattr(plain, name):
            words += [_flag_name(name), str(getattr(setup, name))]
    words += [] if setup.acquire else ["--join"]
    harsh = setup.rates == HARSH
    words += ["--harsh"] if harsh else []
    for name in _CHANCES:
        rate = getattr(setup.rates, name)
        if not harsh and rate != getattr(plain.rates, name):
            words += [_flag_name(name), str(rate)]
    for at, fault in setup.script:
        words += ["--fault", f"{at}:{fault.__struct_config__.tag}" + (f":{fault.node}" if fault.node else "")]
    return shlex.join(words)


def _flag_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _result_json(result: SimResult) -> str:
    shown = {
        "digest": result.digest,
        "entries": result.entries,
        "faults": result.struck,
        "gave_up": result.gave_up,
        "report": msgspec.to_builtins(report_of(result.account)),
    }
    return msgspec.json.encode(shown).decode()


def _result_text(setup: SimSetup, result: SimResult) -> str:
    account = result.account
    mttr = f", mean time to recover {duration_text(account.mttr_s)}" if account.mttr_s is not None else ""
    ettr = account.ettr or 0.0  # a world in which no step was made
    struck = ", ".join(f"{count} {kind}" for kind, count in result.struck.items()) or "none"
    lines = [
        f"ETTR {ettr:.2%} of {duration_text(account.wall_s)} on {setup.nodes} nodes of {setup.nproc} ranks",
        f"incidents {len(account.incidents)}{mttr}; faults: {struck}",
        "where the time went",
        *(f"  {use.value:<22} {duration_text(account.spent_s(use))}" for use in TimeUse if account.spent_s(use) > 0),
        "lost by cause",
        *(
            f"  {cause:<22} {duration_text(lost)}"
            for cause, lost in sorted(account.lost_s().items(), key=lambda i: -i[1])
        ),
        f"journal: {result.entries} entries, sha256 {result.digest}",
    ]
    if result.gave_up:
        lines.append(f"the job gave up: {result.gave_up}")
    return "\n".join(lines)
