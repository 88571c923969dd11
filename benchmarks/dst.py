"""Seeds of the control plane on all cores: everything around it fails, and no promise may be broken."""

import os
import time
from concurrent.futures import ProcessPoolExecutor

from rich.table import Table

from benchmarks._report import FULL, Findings, report
from holdfast.cli.commands.sim_dst import REAL_PARTS, repeat_command
from holdfast.logs import catalog_files
from holdfast.sim.dst.seed_parameters import draw_setup
from holdfast.sim.dst.seed_run import SeedResult, play_seed

SEEDS = 10_000 if FULL else 1_000
GOAL_S = 600.0 * SEEDS / 10_000
CHUNK = 50


def some(first: int) -> list[SeedResult]:
    known = catalog_files.load_failures()
    return [play_seed(draw_setup(seed), REAL_PARTS, known) for seed in range(first, min(first + CHUNK, SEEDS))]


def main() -> None:
    began_at = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results = [result for part in pool.map(some, range(0, SEEDS, CHUNK)) for result in part]
    took_s = time.perf_counter() - began_at
    broken = [result for result in results if result.failure]
    for result in broken:
        print(f"seed {result.seed} is broken {result.failure}\nto see it: {repeat_command(result.seed)}")
    table = Table(title=f"{SEEDS} seeds of the control plane on {os.cpu_count()} cores")
    for column in ("seconds", "broken", "virtual hours", "entries", "steps", "generations", "lives of controllers"):
        table.add_column(column, justify="right")
    counts = [sum(getattr(r, name) for r in results) for name in ("entries", "steps", "generations", "lives")]
    hours = sum(result.virtual_s for result in results) / 3600
    table.add_row(f"{took_s:.0f}", str(len(broken)), f"{hours:.0f}", *map(str, counts))
    faults = {
        kind: sum(r.struck.get(kind, 0) for r in results) for kind in sorted({k for r in results for k in r.struck})
    }
    figures = {"seconds": round(took_s, 1), "seeds": SEEDS, "broken": len(broken), "virtual_hours": round(hours, 1)}
    figures |= {f"faults_{kind}": count for kind, count in faults.items()}
    goals = {"10000_seeds_under_10_minutes": took_s < GOAL_S, "no_seed_is_broken": not broken}
    report("dst", table, Findings(figures={**figures}, goals=goals), {"seconds": [round(took_s, 3)]})


if __name__ == "__main__":
    main()
