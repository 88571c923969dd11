"""`holdfast sim run --gpus` and `holdfast sim validate`: simulate months of a large job under several policies."""

import argparse
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.quantity_text import duration_text
from holdfast.sim.scale import failure_mixes, plots, policy_study, validation
from holdfast.sim.scale.failure_schedule import MECHANISMS, ScaleSetup
from holdfast.sim.scale.scale_result import ScaleSummary, missed_ettr

_ONLY_NODES = ("nodes", "shrink", "save_steps", "join", "harsh", "fault", "journal")
_ALL = "all"


def add_flags(run: argparse.ArgumentParser) -> None:
    """Add the flags of `sim run` that belong to a job at scale."""
    scale = run.add_argument_group("a job at scale, with published failures instead of rates")
    scale.add_argument("--gpus", type=int, metavar="N", help="GPUs that train, --nproc to a node")
    known = ", ".join(failure_mixes.KNOWN)
    said = f"what fails, why and how often: {known}, or a TOML file of that form (default byterobust)"
    scale.add_argument("--failures", default=None, metavar="MIX", help=said)
    named = ", ".join((*policy_study.POLICIES, *policy_study.KEPT))
    said = f"one of {named}, several by commas, or {_ALL}: the first four (default holdfast)"
    scale.add_argument("--policy", default=None, metavar="NAME", help=said)
    said = f"switch a mechanism off: {', '.join(MECHANISMS)}; {_ALL}: each in turn"
    scale.add_argument("--ablate", default=None, metavar="NAME", help=said)
    scale.add_argument("--seeds", type=int, default=None, metavar="N", help="how many, from --seed on (default 3)")
    scale.add_argument("--rate", type=float, default=None, metavar="P", help="incidents per node and day")
    scale.add_argument("--no-updates", action="store_true", help="leave out incidents that are changes of code")
    said = "hours to wait for holdfast approve when no remedy is left (default 4; 0: the job ends)"
    scale.add_argument("--ask-h", type=float, default=None, metavar="H", help=said)
    scale.add_argument("--plot", type=Path, metavar="DIR", help="write plots to this folder, as PNG and SVG")


def add_validate_command(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    what = "compare the simulator with published figures, and show where they disagree"
    parser = commands.add_parser("validate", help=what, description=what)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="of each simulation (default 3)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run_policies(args: argparse.Namespace) -> int:
    setup, mix = _make_setup(args), _load_mix(args)
    seeds = range(setup.seed, setup.seed + (args.seeds if args.seeds is not None else 3))
    if not 1 <= len(seeds) <= 1000:
        raise UsageError("--seeds must be from 1 to 1000")
    mechanisms = _parse_mechanisms(args) if args.ablate is not None else ()
    policies = _parse_policies(args)
    if args.plot:
        plots.require_matplotlib()
        plots.require_folder(args.plot)
    found = (
        policy_study.ablate_mechanisms(setup, mix, seeds, mechanisms)
        if mechanisms
        else policy_study.compare_policies(policies, setup, mix, seeds)
    )
    print(msgspec.json.encode(found).decode()) if args.json else show_summaries(found)
    if args.plot:
        one, book = policy_study.play_policy(found[0].policy, setup, mix)
        drawn = plots.draw_plots(args.plot, found, {one.policy: book.ettr_curves(one.saving)})
        print(f"drawn: {', '.join(path.name for path in drawn)} in {args.plot}") if not args.json else None
    return 0


def run_validation(args: argparse.Namespace) -> int:
    """Compare the simulator with published numbers; returns 0 if only known differences remain."""
    if not 1 <= args.seeds <= 100:
        raise UsageError("--seeds must be from 1 to 100")
    found = validation.run_checks(args.seeds)
    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("", "what", "published", "simulated", "note"):
            table.add_column(column)
        for one in found:
            mark = "agrees" if one.agrees else "differs" if one.known else "DIFFERS"
            table.add_row(mark, one.what, one.published, one.found, one.note)
        Console(highlight=False, width=190).print(table)
    return 0 if all(one.agrees or one.known for one in found) else 1


def _make_setup(args: argparse.Namespace) -> ScaleSetup:
    for name in _ONLY_NODES:
        if getattr(args, name) not in (None, False, []):
            raise UsageError(f"--{name.replace('_', '-')} does not go with --gpus, which brings its own failures")
    if not args.nproc or args.nproc < 1:
        raise UsageError("--nproc must be at least 1")
    if not 2 * args.nproc <= args.gpus <= 1_000_000 or args.gpus % args.nproc:
        raise UsageError(f"--gpus is from {2 * args.nproc} to 1,000,000 and a multiple of --nproc ({args.nproc})")
    days = 90.0 if args.days is None else args.days
    if not 0 < days <= 3650:
        raise UsageError("--days must be above 0 and at most 3650")
    if not 0.01 <= args.step_s <= 86400:
        raise UsageError("--step-s must be between 0.01 and 86400")
    if args.rate is not None and not 0 <= args.rate <= 1:
        raise UsageError("--rate must be from 0 to 1")
    nodes = args.gpus // args.nproc
    if args.standbys is not None and not 0 <= args.standbys <= nodes:
        raise UsageError(
            f"--standbys must be at least 0, and at most as many as there are nodes that train ({nodes:,})"
        )
    ask_h = 4.0 if args.ask_h is None else args.ask_h
    if not 0 <= ask_h <= 1000:
        raise UsageError("--ask-h must be from 0 to 1000")
    return ScaleSetup(
        gpus=args.gpus,
        days=days,
        seed=args.seed,
        nproc=args.nproc,
        standbys=args.standbys,
        step_s=args.step_s,
        rate=args.rate,
        updates=not args.no_updates,
        ask_s=3600 * ask_h,
    )


def _load_mix(args: argparse.Namespace) -> failure_mixes.FailureMix:
    try:
        return failure_mixes.load_mix(args.failures or failure_mixes.KNOWN[0])
    except failure_mixes.MixError as e:
        raise UsageError(str(e)) from None


def _parse_policies(args: argparse.Namespace) -> tuple[str, ...]:
    named = tuple((args.policy or policy_study.POLICIES[0]).split(","))
    if named == (_ALL,):
        return policy_study.POLICIES
    for name in named:
        known = (*policy_study.POLICIES, *policy_study.KEPT)
        if name not in known:
            raise UsageError(f"--policy {name}: there are {', '.join(known)} and {_ALL}")
    return named


def _parse_mechanisms(args: argparse.Namespace) -> tuple[str, ...]:
    if args.policy not in (None, policy_study.POLICIES[0]):
        raise UsageError(f"--ablate is about {policy_study.POLICIES[0]}; drop --policy")
    named = tuple(args.ablate.split(","))
    if named == (_ALL,):
        return tuple(MECHANISMS)
    for name in named:
        if name not in MECHANISMS:
            raise UsageError(f"--ablate {name}: there are {', '.join(MECHANISMS)} and {_ALL}")
    return named


def show_summaries(found: list[ScaleSummary]) -> None:
    first = found[0]
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.title = f"{first.gpus:,} GPUs, {first.days:g} days, failures of {first.failures}, {len(first.seeds)} seeds"
    for column in (
        "policy",
        "ETTR",
        "least to most",
        "worst hour",
        "incidents",
        "evicted",
        "standbys",
        "waits",
        "people",
        *(["loses"] if found[-1].off else []),
    ):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for one in found:
        loses = "{:.2%} +- {:.2%}".format(*missed_ettr(first, one)) if one.off else ""
        last = [loses] if found[-1].off else []
        table.add_row(
            one.policy + "".join(f" without {name}" for name in one.off),
            f"{one.ettr:.2%}",
            f"{one.ettr_least:.2%} to {one.ettr_most:.2%}",
            f"{one.lowest_hour:.0%}",
            f"{one.incidents:.0f}",
            f"{one.evicted:.0f}",
            f"{one.standbys_used:.0f} of {one.standbys}",
            f"{one.waits:.1f}",
            f"{one.people:.1f}",
            *last,
        )
    console = Console(highlight=False, width=140)
    console.print(table)
    if len(found) == 1:
        print("where the time went")
        for use, seconds in first.lost_by_use.items():
            print(f"  {use:<34} {duration_text(seconds)}")
        print("ended by, on average")
        for rung, count in first.rungs.items():
            print(f"  {rung:<34} {count:.1f}")
        print("lost by cause")
        for cause, seconds in first.lost_by_cause.items():
            print(f"  {cause:<34} {duration_text(seconds)}")
