"""What copies to peers cost a step: sent in gaps between collectives, paced by `backup.duty`, and none, in turns.

Two gloo ranks on two nodes of this host exchange 8 MB at the begin of a step, pause as while a device computes, and
take a snapshot. A job of each way is measured once copies are paced as they are to be. The first job of each round is
another one without copies; it tells what two equal jobs differ by.
"""

import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks._harness import START_LIMIT_S, Job, holdfast
from benchmarks._report import Findings, report
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.wire.controller_request import ControllerNotRunning

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "2"))
STEPS = 50
SETTLE_STEPS = 12  # in which gaps are learned; jobs without copies make as many
ASK_S = 0.05
AGE_GOAL, COST_GOAL = 2, 0.001
NONE = ("--set=backup.enabled=false",)
WAYS = {"again": NONE, "none": NONE, "duty": ("--set=backup.pacing=duty",), "gaps": ()}
PACED = {"duty": "duty: backup.pacing", "gaps": "gaps"}


class Measured(msgspec.Struct, frozen=True):
    """One job: the seconds of its steps, how old copies were at the end of each, and how many had that pacing."""

    steps_s: list[float]
    ages: list[int]
    paced: float
    otherwise: str  # the pacing that was seen most often instead


def ask_status(job: Job) -> dict[str, object]:
    try:
        found: dict[str, object] = ask_controller(job.folder / "run", "/api/v1/status")
    except (ControllerNotRunning, OSError):
        return {}
    return found


def is_paced(name: str, pacing: str) -> bool:
    return pacing.startswith(PACED.get(name, ""))


def run_job(name: str) -> Measured:
    with Job(2, Path(__file__).with_name("_gap_rank.py")) as job:
        job.start(holdfast(job.folder / "run", "--nnodes=2", "--nproc-per-node=1", *WAYS[name]))
        if job.wait_steps(SETTLE_STEPS) is None:
            raise RuntimeError(f"{name} made no steps: {job.last_words()}")
        seen: list[tuple[float, int, str]] = []  # when, step that all peers have, and how copies are paced
        first, until = 0, time.monotonic() + START_LIMIT_S
        while time.monotonic() < until:
            status, now = ask_status(job), time.time()
            pacing = str(status.get("pacing", ""))
            seen.append((now, int(str(status.get("floor", -1))), pacing))
            newest = max(event.step for event in job.events())
            first = first or (newest + 2 if is_paced(name, pacing) and newest >= SETTLE_STEPS else 0)
            if first and newest >= first + STEPS:
                break
            time.sleep(ASK_S)
        else:
            raise RuntimeError(f"{name} was not paced so in time: {job.last_words()}")
        ends = {event.step: event.at for event in job.events() if event.rank == 0}
        looks = [pacing for at, _, pacing in seen if at >= ends[first]]
        others = Counter(pacing for pacing in looks if not is_paced(name, pacing))
        paced = 1 - others.total() / len(looks)
        steps = range(first, first + STEPS)
        # A floor was there when it was seen, and perhaps somewhat before: so ages are at most these.
        ages = [step - max((floor for at, floor, _ in seen if at <= ends[step]), default=-1) for step in steps]
        steps_s = [ends[step] - ends[step - 1] for step in steps[1:]]
        return Measured(steps_s, ages, paced, max(others, key=lambda one: others[one], default=""))


def judge(found: dict[str, list[Measured]]) -> tuple[Table, Findings]:
    middles = {name: [statistics.median(one.steps_s) for one in runs] for name, runs in found.items()}
    costs = {
        name: [one / none - 1 for one, none in zip(each, middles["none"], strict=True)]
        for name, each in middles.items()
    }
    spreads = [max(each) - min(each) for each in costs.values()]
    noise = max(*map(abs, costs["again"]), *spreads)
    heads = ("copies", "step, ms", "longer by", "age, steps: median", "90 %", "most")
    table = Table(*heads, title=(__doc__ or "").partition("\n")[0])
    findings = Findings(figures={"rounds": len(middles["none"]), "noise": round(noise, 5)})
    for name in WAYS:
        ages = sorted(age for one in found[name] for age in one.ages)
        cost = statistics.median(costs[name])
        old = [str(ages[len(ages) // 2]), str(ages[len(ages) * 9 // 10]), str(ages[-1])] if name in PACED else [""] * 3
        table.add_row(name, f"{1000 * statistics.median(middles[name]):.2f}", f"{100 * cost:+.2f} %", *old)
        findings.figures |= {f"{name}_step_ms": round(1000 * statistics.median(middles[name]), 3)}
        findings.figures |= {f"{name}_cost": round(cost, 5)}
        if name in PACED:
            figures = {"age_median": ages[len(ages) // 2], "age_p90": ages[len(ages) * 9 // 10], "age_most": ages[-1]}
            findings.figures |= {f"{name}_{key}": value for key, value in figures.items()}
            findings.figures[f"{name}_paced_so"] = round(statistics.fmean(one.paced for one in found[name]), 3)
            findings.figures[f"{name}_otherwise"] = "; ".join(sorted({one.otherwise for one in found[name]} - {""}))
    findings.goals[f"copy_age_steps <= {AGE_GOAL}"] = float(str(findings.figures["gaps_age_most"])) <= AGE_GOAL
    goal = f"step_cost <= {100 * COST_GOAL:g} %"
    if noise > COST_GOAL:
        findings.skipped[goal] = f"equal jobs differed by up to {100 * noise:.2f} % here"
    else:
        findings.goals[goal] = float(str(findings.figures["gaps_cost"])) <= COST_GOAL
    return table, findings


def main() -> int:
    found: dict[str, list[Measured]] = {name: [] for name in WAYS}
    for number in range(ROUNDS):
        for name in list(WAYS)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(run_job(name))
            print(f"  {name}: {1000 * statistics.median(found[name][-1].steps_s):.2f} ms", flush=True)
    table, findings = judge(found)
    runs = {f"{name}, s of a step": [step_s for one in each for step_s in one.steps_s] for name, each in found.items()}
    ages = {f"{name}, age": [float(age) for one in found[name] for age in one.ages] for name in PACED}
    report("gaps", table, findings, {name: list[float | None](each) for name, each in (runs | ages).items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
