"""`holdfast probe`: tests this machine without a job; prints each finding as it comes, then a table."""

import argparse
import asyncio
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.agent.diagnostics.probe_runner import ProbeTerms, run_probes
from holdfast.agent.diagnostics.site_test import run_site_test
from holdfast.agent.probes import PROBES
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.quantity_text import counted_noun
from holdfast.core.diagnose.probe_assessment import (
    ProbeAssessment,
    ProbeLimits,
    assess_probes,
    finding_sentence,
    golden_rows,
)
from holdfast.logs import golden_probe_digests
from holdfast.model.probe_findings import Finding

FAILED = 1
_HERE = "this node"
_LEVELS = {1: "seconds", 2: "a minute", 3: "and a reference model, bit for bit"}
_MARKS = {True: ("ok", "green"), False: ("FAILED", "bold red"), None: ("not judged", "yellow")}


def main(argv: list[str]) -> int:
    args = _make_parser().parse_args(argv)
    try:
        level = _checked_level(args)
        findings = asyncio.run(_collect_findings(args, level))
    except UsageError as e:
        print(f"holdfast probe: {e}", file=sys.stderr)
        return 2
    judged = assess_probes({_HERE: findings}, golden_probe_digests.load_golden())
    bad = bool(judged.bad) or any(f.ok is False for f in findings)
    if args.golden:
        print(golden_rows(findings))
    elif args.json:
        said = {"ok": not bad, "reason": judged.summary_text, "findings": findings}
        print(msgspec.json.encode(said).decode())
    else:
        Console(markup=False, highlight=False, soft_wrap=True).print(findings_table(findings))
        print(_verdict_text(findings, judged))
    return FAILED if bad else 0


def _make_parser() -> argparse.ArgumentParser:
    what = "Probe this machine: processors, GPUs, memory, disk, clock. The exit code is 1 if a probe failed."
    parser = CommandParser(prog="holdfast probe", description=what)
    levels = "; ".join(f"{level}: {said}" for level, said in _LEVELS.items())
    parser.add_argument("--level", type=int, default=1, metavar="1..3", help=f"how thoroughly (default 1). {levels}")
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"of {', '.join(p.name for p in PROBES)}")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="of what must give the same bits each time")
    parser.add_argument(
        "--budget", type=float, default=0.0, metavar="S", help="seconds for all probes (default: no end)"
    )
    parser.add_argument("--where", type=Path, default=Path(), metavar="DIR", help="whose disk to probe (default: here)")
    parser.add_argument("--command", default="", metavar="CMD", help="a test of your own as well: exit code 0 is well")
    limit_s = ProbeLimits().command_s
    parser.add_argument("--command-s", type=float, default=limit_s, metavar="S", help=f"(default {limit_s:g})")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, at the end")
    parser.add_argument("--golden", action="store_true", help="print this machine's bits as rows for golden.toml")
    return parser


def _checked_level(args: argparse.Namespace) -> int:
    """Return the highest of --level and the levels of the named probes. Raise UsageError if a flag is wrong."""
    known = {probe.name: probe.level for probe in PROBES}
    names = [name for name in args.only.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"there is no probe '{unknown[0]}'; there are {', '.join(known)}")
    if not 1 <= args.level <= 3:
        raise UsageError("--level must be 1, 2 or 3")
    if not 1 <= args.repeats <= 1_000_000 or not 0 <= args.budget < float("inf"):
        raise UsageError("--repeats must be at least 1, and --budget not negative")
    if not 0 < args.command_s < float("inf"):
        raise UsageError("--command-s must be above 0")
    if not args.where.is_dir():
        raise UsageError(f"there is no folder {args.where}")
    args.only = names
    if args.golden:
        args.only = names or [name for name in known if name.endswith("_bits") or name == "reference"]
    level: int = max([args.level, *(known[name] for name in args.only)])
    return level


async def _collect_findings(args: argparse.Namespace, level: int) -> list[Finding]:
    found = []
    terms = ProbeTerms(nice=0)
    probes = run_probes(
        level, args.budget, sys.executable, args.where, only=args.only, repeats=args.repeats, terms=terms
    )
    async for finding in probes:
        found.append(finding)
        _print_finding(args, finding)
    if args.command:
        found.append(await run_site_test(args.command, args.command_s, level=level))
        _print_finding(args, found[-1])
    return found


def _print_finding(args: argparse.Namespace, finding: Finding) -> None:
    if not args.json and not args.golden:
        print(finding_sentence(finding), flush=True)


def findings_table(findings: list[Finding]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("level", "probe", "on", "form", "verdict", "value", "bits", "took"):
        made.add_column(column, justify="right" if column in ("value", "took") else "left")
    for f in findings:
        said, style = _MARKS[f.ok]
        value = f"{f.value:.4g} {f.unit}" if f.value is not None else ""
        verdict = Text(said, style=style)
        made.add_row(str(f.level), f.probe, f.place, f.form, verdict, value, f.digest[:12], f"{f.took_s:.2f} s")
    return made


def _verdict_text(findings: list[Finding], judged: ProbeAssessment) -> str:
    failed = [f for f in findings if f.ok is False]
    told = f"{counted_noun(len(findings), 'finding')}, {len(failed)} failed"
    return f"{told}: {judged.summary_text}" if judged.bad else f"{told}; nothing wrong was found"
