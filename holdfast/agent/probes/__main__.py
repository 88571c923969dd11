"""Runs probes one after another; prints a line when a probe begins, and one for each finding as it is made."""

import argparse
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA comes up; without it sums may differ

import msgspec

from holdfast.agent.probes import SKIPPED, START, ProbeEntry, ProbeLine, ProbeRequest, choose_probes
from holdfast.core.diagnose.probe_assessment import finding_sentence
from holdfast.linux import own_process_settings
from holdfast.model.probe_findings import Finding

Tell = Callable[[ProbeLine], None]


def main() -> None:
    args = _make_parser().parse_args()
    if args.parent:
        own_process_settings.die_with_parent(args.parent)
    os.nice(args.nice)
    _die_first()
    _run_probes(args, _line_printer(args.json))
    os._exit(0)  # all is said; taking torch and CUDA down takes long, and may hang on a sick machine


def _run_probes(args: argparse.Namespace, tell: Tell) -> None:
    asked = ProbeRequest(level=args.level, where=args.where, small=args.small, repeats=args.repeats)
    left_s, up = args.budget or float("inf"), False
    # Where a machine is shared it is the work that counts: who is niced and waits takes nothing from anybody.
    clock = time.process_time if args.small else time.perf_counter
    for probe in choose_probes(args.level, args.only, args.skip):
        if left_s <= 0:
            tell(ProbeLine(finding=Finding(probe=probe.name, level=probe.level, ok=None, detail=SKIPPED)))
            continue
        if probe.torch and not up:
            tell(ProbeLine(began=START))
            importlib.import_module("holdfast.agent.probes.probe_tools").make_deterministic()
            up = True
        tell(ProbeLine(began=probe.name))
        began = clock()
        _run_probe(probe, msgspec.structs.replace(asked, left_s=left_s), tell)
        left_s -= clock() - began  # what the imports took is no part of the budget


def _run_probe(probe: ProbeEntry, asked: ProbeRequest, tell: Tell) -> None:
    began = time.perf_counter()
    for finding in importlib.import_module(f"holdfast.agent.probes.{probe.module or probe.name}").run(asked):
        now = time.perf_counter()
        tell(ProbeLine(finding=msgspec.structs.replace(finding, level=probe.level, took_s=round(now - began, 4))))
        began = now


def _line_printer(as_json: bool) -> Tell:
    # Libraries print where they like (NCCL its version, on the standard output); findings go out by a way of their own.
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def tell(told: ProbeLine) -> None:
        if as_json:
            print(msgspec.json.encode(told).decode(), file=out)
        elif told.finding:
            print(finding_sentence(told.finding), file=out)

    return tell


def _die_first() -> None:
    """Have the kernel kill this process first when memory runs out, and not the keeper of snapshots."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        pass


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m holdfast.agent.probes", description=__doc__)
    parser.add_argument("--level", type=int, default=1, choices=(1, 2, 3))
    parser.add_argument("--only", default="", metavar="NAME,...")
    parser.add_argument("--skip", default="", metavar="NAME,...")
    parser.add_argument(
        "--budget", type=float, default=0.0, metavar="S", help="for all probes together; 0: as long as they need"
    )
    parser.add_argument("--small", action="store_true", help="use small sizes")
    parser.add_argument("--repeats", type=int, default=1, help="of probes that must give the same bits each time")
    parser.add_argument("--where", type=Path, default=Path(), help="a folder on the disk to probe")
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--parent", type=int, default=0, help="pid of the process that this one dies with")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    main()
