"""What one step of the decider costs: the events of simulated months and of a bad day, told to a fresh decider again.

Most events of a month are progress; on the bad day alarms, outcomes and reports of nodes outnumber it.
"""

import statistics
import time

from rich.table import Table

from benchmarks._report import FULL, Findings, report
from holdfast.core.decide.decider import Decider
from holdfast.model.journal_entry import Entry
from holdfast.sim.checked_seed_run import simulate
from holdfast.sim.fault_source import FaultRates
from holdfast.sim.job_world import SimSetup

GOAL_US = 100.0
ROUNDS = 5 if FULL else 2
MIXES = {
    "month": SimSetup(seed=1, nodes=1250, standbys=4, days=30.0),
    "bad_day": SimSetup(
        seed=1, nodes=1250, standbys=8, days=1.0, save_steps=5, progress_s=600.0,
        rates=FaultRates(loss=0.02, crash=0.03, cut=0.02, fleet_fails=0.2, dud=0.05),
    ),
}  # fmt: skip


def steps_us(entries: list[Entry]) -> list[tuple[str, float]]:
    """What every step took, with the sort of event it was."""
    decider = Decider()
    taken = []
    for entry in entries:
        start = time.perf_counter_ns()
        decider.step(entry.at, entry.event)
        taken.append((type(entry.event).__name__, (time.perf_counter_ns() - start) / 1000))
    return taken


def add_rows(table: Table, mix: str, taken: list[tuple[str, float]]) -> None:
    kinds = ["", *sorted({kind for kind, _ in taken})]
    for kind in kinds:
        times = sorted(us for found, us in taken if kind in ("", found))
        row = (statistics.median(times), times[int(0.99 * (len(times) - 1))], times[-1])
        name = mix if not kind else f"  {kind}"
        table.add_row(name, str(len(times)), *(f"{us:.1f}" for us in row))


def main() -> None:
    table = Table(title="one step of the decider for 1,250 nodes, microseconds")
    for column in ("events", "count", "median", "p99", "max"):
        table.add_column(column, justify="left" if column == "events" else "right")
    findings = Findings()
    runs: dict[str, list[float | None]] = {}
    for mix, setup in MIXES.items():
        entries: list[Entry] = []
        simulate(setup, entries.append)
        taken = [step for _ in range(ROUNDS) for step in steps_us(entries)]
        add_rows(table, mix, taken)
        median = statistics.median(us for _, us in taken)
        findings.figures[f"{mix}_median_us"] = round(median, 2)
        findings.figures[f"{mix}_p99_us"] = round(statistics.quantiles([us for _, us in taken], n=100)[98], 2)
        findings.goals[f"{mix}_median_under_100_us"] = median < GOAL_US
        runs[mix] = [round(us, 2) for _, us in taken[:: max(1, len(taken) // 1000)]]
    report("decider", table, findings, runs)


if __name__ == "__main__":
    main()
