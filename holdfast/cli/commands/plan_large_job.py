"""`holdfast plan --gpus`: sizes standbys and checkpoints for a large job; simulates its ETTR with and without them."""

import argparse

import msgspec
from rich.console import Console
from rich.table import Table

from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.quantity_text import duration_text
from holdfast.core.membership.standby_sizing import LossRates, size_standbys
from holdfast.core.snapshots.checkpoint_interval import best_interval
from holdfast.sim.scale import failure_mixes, policy_study
from holdfast.sim.scale.failure_schedule import ScaleSetup
from holdfast.sim.scale.holdfast_policy import NAME
from holdfast.sim.scale.scale_result import ScaleSummary

_NO_COPIES = "no copies on peers"
# What is compared, and what each goes without.
_CHOICES = {
    "all of it": frozenset[str](),
    "no standbys": frozenset({"standbys"}),
    _NO_COPIES: frozenset({"backups"}),
    "no state in memory": frozenset({"snapshots"}),
    "neither standbys nor state in memory": frozenset({"standbys", "snapshots"}),
}

# Why going without something may cost less than having it.
WHY_BETTER = {
    _NO_COPIES: "copies are charged a share of the time that is derived, not measured, and so few nodes are lost that "
    "they save less; without copies the loss of a node costs the work since the last checkpoint on storage",
}


class PlanChoice(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    ettr: float
    spread: float | None  # None: one seed tells nothing of it
    unlike: bool  # whether every seed says that it is worse than the first choice
    better: bool = False  # whether every seed says that it is better
    idle: float  # part of all nodes that only waits
    lost_h: float  # hours a month


class PlanAdvice(msgspec.Struct, frozen=True, kw_only=True):
    gpus: int
    nodes: int
    failures_per_day: float
    standbys: int  # every node by itself
    standbys_wide: int  # with groups and switches
    save_every_s: float  # of a script that saves by itself
    save_reason: str
    stored_every_s: float  # beside state in memory
    stored_reason: str
    choices: tuple[PlanChoice, ...]


def add_flags(parser: argparse.ArgumentParser) -> None:
    large = parser.add_argument_group("the whole answer, from a simulation")
    large.add_argument("--gpus", type=int, metavar="N", help="size of the job; answers with standbys, cadence, ETTR")
    said = f"what fails: {', '.join(failure_mixes.KNOWN)}, or a TOML file (default byterobust)"
    large.add_argument("--failures", default=failure_mixes.KNOWN[0], metavar="MIX", help=said)
    large.add_argument("--nproc", type=int, default=8, metavar="N", help="GPUs of a node (default 8)")
    said = "seconds that one checkpoint on storage takes from training, where the script saves by itself (default 30)"
    large.add_argument("--save-s", type=float, default=30.0, metavar="S", help=said)
    large.add_argument("--step-s", type=float, default=10.0, metavar="S", help="seconds of a step (default 10)")
    large.add_argument("--days", type=float, default=30.0, metavar="D", help="simulated (default 30)")
    large.add_argument("--seeds", type=int, default=3, metavar="N", help="simulated (default 3)")


def run(args: argparse.Namespace) -> int:
    advice = make_advice(args)
    if args.json:
        print(msgspec.json.encode(advice).decode())
    else:
        _show_advice(advice)
    return 0


def make_advice(args: argparse.Namespace) -> PlanAdvice:
    mix, setup = _load_mix(args), _make_setup(args)
    rate = mix.rate if args.p_day is None else args.p_day
    nodes, per_day = setup.nodes, setup.nodes * rate
    days = args.refill_h / 24
    blasts = [(blast.share * per_day, blast.nodes) for blast in mix.blast]
    if args.blasts_day is not None:
        blasts = [(args.blasts_day, args.blast)]
    losses = LossRates(
        nodes=nodes,
        p=min(1.0, rate * days),
        group=args.group,
        group_share=args.group_share,
        blasts=tuple((many * days, each) for many, each in blasts if each),
    )
    sizing = size_standbys(losses, args.confidence)
    alone = best_interval(args.save_s, per_day)
    # State in memory is lost together with its copy only where a switch takes both; writing it costs training nothing.
    beside = best_interval(args.save_s, sum(many for many, _ in blasts))
    seeds = range(1, args.seeds + 1)
    return PlanAdvice(
        gpus=args.gpus,
        nodes=nodes,
        failures_per_day=per_day,
        standbys=sizing.plain,
        standbys_wide=sizing.ours,
        save_every_s=alone.every_s,
        save_reason=alone.reason,
        stored_every_s=beside.every_s,
        stored_reason=beside.reason,
        choices=_simulate_choices(setup, mix, seeds),
    )


def _simulate_choices(setup: ScaleSetup, mix: failure_mixes.FailureMix, seeds: range) -> tuple[PlanChoice, ...]:
    found = [
        policy_study.play_seeds(NAME, msgspec.structs.replace(setup, off=off), mix, seeds) for off in _CHOICES.values()
    ]
    return tuple(_make_choice(what, one, found[0], setup.nodes) for what, one in zip(_CHOICES, found, strict=True))


def _make_choice(what: str, found: ScaleSummary, first: ScaleSummary, nodes: int) -> PlanChoice:
    several = len(found.seeds) > 1
    pairs = list(zip(found.ettrs, first.ettrs, strict=True))
    return PlanChoice(
        what=what,
        ettr=found.ettr,
        spread=(found.ettr_most - found.ettr_least) / 2 if several else None,
        unlike=several and all(one < other for one, other in pairs),
        better=several and all(one > other for one, other in pairs),
        idle=found.standbys / (nodes + found.standbys),
        lost_h=(1 - found.ettr) * 30 * 24,
    )


def _load_mix(args: argparse.Namespace) -> failure_mixes.FailureMix:
    try:
        return failure_mixes.load_mix(args.failures)
    except failure_mixes.MixError as e:
        raise UsageError(str(e)) from None


def _make_setup(args: argparse.Namespace) -> ScaleSetup:
    if args.nproc < 1 or not 2 * args.nproc <= args.gpus <= 200_000 or args.gpus % args.nproc:
        raise UsageError(f"--gpus is from {2 * args.nproc} to 200,000 and a multiple of --nproc ({args.nproc})")
    if not 0 < args.save_s <= 86400 or not 0.01 <= args.step_s <= 86400:
        raise UsageError("--save-s and --step-s must be above 0 and at most 86400 seconds")
    if not 1 <= args.days <= 3650 or not 1 <= args.seeds <= 100:
        raise UsageError("--days must be from 1 to 3650, --seeds from 1 to 100")
    return ScaleSetup(gpus=args.gpus, nproc=args.nproc, days=args.days, step_s=args.step_s, rate=args.p_day)


def _show_advice(advice: PlanAdvice) -> None:
    between = f", one every {duration_text(86400 / advice.failures_per_day)}" if advice.failures_per_day else ""
    print(f"{advice.gpus:,} GPUs on {advice.nodes:,} nodes: {advice.failures_per_day:.2f} incidents a day{between}")
    print(f"standbys: {advice.standbys} for single nodes, {advice.standbys_wide} to cover groups and switches too")
    print(f"checkpoints on storage, a script that saves by itself: every {duration_text(advice.save_every_s)}")
    print(f"  ({advice.save_reason})")
    print(f"checkpoints on storage beside state in memory at every step: every {duration_text(advice.stored_every_s)}")
    print(f"  (for what memory and its copies both lose: {advice.stored_reason})")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("what to expect", "ETTR", "+-", "nodes that wait", "lost in 30 days"):
        table.add_column(column, justify="left" if column == "what to expect" else "right")
    for one in advice.choices:
        lost, spread = f"{one.lost_h:.1f} h", "?" if one.spread is None else f"{one.spread:.2%}"
        table.add_row(one.what, f"{one.ettr:.2%}", spread, f"{one.idle:.2%}", lost)
    Console(highlight=False, soft_wrap=True).print(table)
    if advice.choices[0].spread is None:
        print("one seed cannot show how much of this is chance; give --seeds 3 or more")
        return
    if alike := [one.what for one in advice.choices[1:] if not one.unlike and not one.better]:
        print(f"with these seeds no clear difference from '{advice.choices[0].what}': {', '.join(alike)}")
    for one in advice.choices[1:]:
        if one.better:
            why = f": {WHY_BETTER[one.what]}" if one.what in WHY_BETTER else ""
            print(f"with every one of these seeds less was lost with '{one.what}'{why}")
