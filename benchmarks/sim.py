"""How long 30 simulated days of 1,250 nodes take on one core, with all checks on."""

import resource
import statistics
import time

from rich.table import Table

from benchmarks._report import FULL, Findings, report
from holdfast.sim.checked_seed_run import simulate
from holdfast.sim.job_world import SimSetup

GOAL_S = 60.0
SEEDS = range(1, 6) if FULL else range(1, 3)


def main() -> None:
    table = Table(title="30 days of 1,250 nodes with 4 standbys, in virtual time")
    for column in ("seed", "seconds", "entries", "incidents", "ETTR", "journal"):
        table.add_column(column, justify="right")
    taken, shares = [], []
    for seed in SEEDS:
        start = time.perf_counter()
        result = simulate(SimSetup(seed=seed, nodes=1250, standbys=4, days=30.0))
        taken.append(time.perf_counter() - start)
        shares.append(result.account.ettr or 0.0)
        counts = (str(result.entries), str(len(result.account.incidents)))
        table.add_row(str(seed), f"{taken[-1]:.1f}", *counts, f"{100 * shares[-1]:.2f} %", result.digest[:12])
    figures = {
        "median_s": round(statistics.median(taken), 2),
        "max_s": round(max(taken), 2),
        "ettr": round(statistics.mean(shares), 4),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 0),
    }
    goals = {"30_days_of_1250_nodes_under_60_s": max(taken) < GOAL_S}
    report("sim", table, Findings(figures={**figures}, goals=goals), {"seconds": [round(s, 3) for s in taken]})


if __name__ == "__main__":
    main()
