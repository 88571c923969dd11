"""`holdfast plan`: says how many standbys a job needs, given how often nodes fail. With --gpus, it also says how often
to save checkpoints and simulates the job's ETTR."""

import argparse
import sys

import msgspec
from rich.console import Console
from rich.table import Table

from holdfast.cli.commands import plan_large_job
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.core.membership.standby_sizing import LossRates, StandbySizing, size_standbys

# What ByteRobust's authors saw: of 175 incidents of a dense job 15 evicted a group of 8, and a switch has 32 machines.
_GROUP, _GROUP_SHARE, _BLAST, _BLAST_SHARE = 8, 15 / 175, 32, 0.01
_P_DAY = 0.0012
_MOST = 1_000_000
_HALVES = 3  # smaller jobs beside the one that was asked for


def main(argv: list[str]) -> int:
    args = _make_parser().parse_args(argv)
    try:
        if fault := _argument_fault(args):
            raise UsageError(fault)
        if args.gpus is not None:
            return plan_large_job.run(args)
    except UsageError as e:
        print(f"holdfast plan: {e}", file=sys.stderr)
        return 2
    args.p_day = _P_DAY if args.p_day is None else args.p_day
    counts = [args.nodes >> times for times in range(_HALVES, -1, -1) if args.nodes >> times > 0]
    found = {nodes: size_standbys(_make_losses(nodes, args), args.confidence) for nodes in dict.fromkeys(counts)}
    if args.json:
        print(msgspec.json.encode({str(nodes): sizing for nodes, sizing in found.items()}).decode())
        return 0
    Console(highlight=False, soft_wrap=True).print(_standby_table(found, args.confidence))
    print(f"--standbys {found[args.nodes].ours} for {args.nodes} nodes")
    return 0


def _make_parser() -> argparse.ArgumentParser:
    what = "Work out how many standbys to keep, so that on 99 of 100 days the job never waits for a node."
    parser = CommandParser(prog="holdfast plan", description=what)
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="nodes of the job; answers with standbys only, for smaller jobs too"
    )
    parser.add_argument(
        "--p-day", type=float, metavar="P", help="chance that a node fails on a day (default 0.0012; --gpus: the mix)"
    )
    parser.add_argument(
        "--refill-h", type=float, default=24.0, metavar="H", help="hours to replace a used standby (default 24)"
    )
    parser.add_argument("--group", type=int, default=_GROUP, metavar="N", help="nodes of a parallel group (default 8)")
    parser.add_argument(
        "--group-share",
        type=float,
        default=_GROUP_SHARE,
        metavar="S",
        help="share of incidents that evict a whole group (default 0.086)",
    )
    parser.add_argument("--blast", type=int, default=_BLAST, metavar="N", help="nodes behind a switch (default 32)")
    parser.add_argument(
        "--blasts-day",
        type=float,
        default=None,
        metavar="R",
        help="switches lost on a day (default: 1 of 100 incidents)",
    )
    parser.add_argument("--confidence", type=float, default=0.99, metavar="C", help="(default 0.99)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    plan_large_job.add_flags(parser)
    return parser


def _argument_fault(args: argparse.Namespace) -> str:
    p_day = _P_DAY if args.p_day is None else args.p_day
    checks = (
        ((args.nodes is None) != (args.gpus is None), "give the size of the job: either --nodes or --gpus"),
        (args.nodes is None or 1 <= args.nodes <= _MOST, "--nodes must be from 1 to 1,000,000"),
        (0 <= p_day < 1 and 0 < args.confidence < 1, "--p-day and --confidence must be between 0 and 1"),
        (0 < args.refill_h <= 87600, "--refill-h must be above 0 and at most 87600 (ten years)"),
        (0 <= args.group_share <= 1, "--group-share must be from 0 to 1"),
        (
            1 <= args.group <= _MOST and 0 <= args.blast <= _MOST,
            "--group must be from 1, and --blast from 0, to 1,000,000",
        ),
        (args.blasts_day is None or 0 <= args.blasts_day <= _MOST, "--blasts-day must be from 0 to 1,000,000"),
    )
    return next((why for holds, why in checks if not holds), "")


def _make_losses(nodes: int, args: argparse.Namespace) -> LossRates:
    days = args.refill_h / 24
    blasts = args.blasts_day if args.blasts_day is not None else _BLAST_SHARE * nodes * args.p_day
    return LossRates(
        nodes=nodes,
        p=min(1.0, args.p_day * days),
        group=args.group,
        group_share=args.group_share,
        blasts=((blasts * days, args.blast),) if args.blast else (),
    )


def _standby_table(found: dict[int, StandbySizing], confidence: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("nodes", justify="right")
    table.add_column("each by itself", justify="right")
    table.add_column("with groups and switches", justify="right")
    table.add_column("the first number is not enough", justify="right")
    for nodes, sizing in found.items():
        table.add_row(str(nodes), str(sizing.plain), str(sizing.ours), f"{sizing.short:.1%} of days")
    table.title = f"standbys, for {confidence:.0%} of days"
    return table
