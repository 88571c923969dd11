"""What `holdfast.survive` costs a step while nothing fails: the same job with it, and with restarts alone, in turns.

Both keep their state of every step in memory, so what differs is what survivors need. Four gloo ranks rest for 20 ms in
each step; a pair's ratio is that of the median times from step to step of all ranks.
"""

import os
import statistics
import sys

from rich.table import Table

from benchmarks._elastic_ways import OURS, RESTART, SEATS, Way, list_ways
from benchmarks._harness import START_LIMIT_S, Job
from benchmarks._report import FULL, Findings, report
from benchmarks.elastic import find_seated, median_step_s

PAIRS = int(os.environ.get("BENCH_ROUNDS", "10" if FULL else "3"))
STEPS = 600 if FULL else 300
GOAL = 0.003


def time_step(way: Way) -> float:
    """Return the median time of a step in milliseconds, in a job of its own."""
    with Job(SEATS, way.script) as job:
        way.start(job)
        made = job.wait(lambda: find_seated(job.events(), 1, STEPS), START_LIMIT_S + STEPS)
        if made is None:
            raise RuntimeError(f"{way.name} did not come to step {STEPS}: {job.last_words()}")
        return 1000 * median_step_s(job.events(), made[0].generation)


def judge(with_ms: list[float], without_ms: list[float]) -> tuple[Table, Findings]:
    ratios = [one / other - 1 for one, other in zip(with_ms, without_ms, strict=True)]
    middle = statistics.fmean(ratios)
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    table = Table("a step, ms", "survive", "restarts", "longer by", title=(__doc__ or "").partition("\n")[0])
    for one, other, ratio in zip(with_ms, without_ms, ratios, strict=True):
        table.add_row("", f"{one:.3f}", f"{other:.3f}", f"{100 * ratio:+.2f} %")
    table.add_row(f"{len(ratios)} pairs", "", "", f"{100 * middle:+.2f} +- {100 * error:.2f} %")
    findings = Findings(figures={"pairs": len(ratios), "longer_by": round(middle, 5), "error": round(error, 5)})
    findings.figures |= {"survive_ms": round(statistics.median(with_ms), 3)}
    findings.figures |= {"restart_ms": round(statistics.median(without_ms), 3)}
    findings.goals[f"longer by at most {100 * GOAL:g} %"] = middle <= GOAL
    findings.goals["the error is less than that"] = error < GOAL
    return table, findings


def main() -> int:
    ways = {way.name: way for way in list_ways()[0]}
    took: dict[str, list[float]] = {OURS: [], RESTART: []}
    for number in range(PAIRS):
        for name in (OURS, RESTART) if number % 2 else (RESTART, OURS):
            took[name].append(time_step(ways[name]))
            print(f"  {name}: {took[name][-1]:.3f} ms", flush=True)
    table, findings = judge(took[OURS], took[RESTART])
    report("elastic_steps", table, findings, {name: list[float | None](each) for name, each in took.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
