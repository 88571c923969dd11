"""What running under holdfast costs: one call of holdfast.step, and the time of a 50-ms step beside plain python."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks._harness import executable
from benchmarks._report import FULL, Findings, report

HERE = Path(__file__).parent
STEP_S = 0.05
PAIRS, STEPS = (6, 400) if FULL else (3, 150)
COLD_STEPS = 10  # caches, allocator and lazy imports settle in the first ones
LIMIT_S = 180.0

PYTHON = [sys.executable]
STEP_GOAL_US, STEADY_GOAL = 5.0, 0.01


def holdfast(folder: Path) -> list[str]:
    run_dir = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    return [executable("holdfast"), "run", "--standalone", "--nproc-per-node=1", f"--run-dir={run_dir}"]


def ask(launch: Sequence[str], script: str, to: Path, *args: str) -> Any:
    """Run a script to its end, and read what it found."""
    done = subprocess.run(
        [*launch, str(HERE / script), *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(to.read_text())


def step_time(launch: Sequence[str], folder: Path, steps: int, work: int) -> float:
    to = folder / "steps.json"
    took = ask(launch, "_steady.py", to, f"--to={to}", f"--steps={steps}", f"--work={work}")
    return statistics.median(took[COLD_STEPS:])


def calibrated(folder: Path) -> int:
    """How much work makes a step of the wanted length here; found once, so that both sides do the same."""
    guess = 50
    return max(1, round(guess * STEP_S / step_time(PYTHON, folder, 60, guess)))


def step_cost(folder: Path, table: Table, findings: Findings) -> None:
    to = folder / "calls.json"
    for name, launch in {"attached": holdfast(folder), "alone": PYTHON}.items():
        found = ask(launch, "_step_calls.py", to, str(to))
        if found["attached"] != (name == "attached"):
            raise RuntimeError(f"holdfast.step was to be timed {name}, and was not")
        findings.figures[f"step_call_{name}_us"] = found["median_us"]
        findings.figures[f"step_call_{name}_p99_us"] = found["p99_us"]
        table.add_row(f"holdfast.step, {name}", f"{found['median_us']:.2f} us", f"p99 {found['p99_us']:.2f} us")
    findings.goals["step_call_under_5_us"] = float(findings.figures["step_call_attached_us"] or 0) < STEP_GOAL_US


def steady(folder: Path, table: Table, findings: Findings) -> dict[str, list[float | None]]:
    """Plain and under holdfast in turn, so that a machine that changes its pace changes it for both."""
    work = calibrated(folder)
    plain: list[float | None] = []
    under: list[float | None] = []
    ratios: list[float] = []
    for _ in range(PAIRS):
        alone_s = step_time(PYTHON, folder, STEPS, work)
        under_s = step_time(holdfast(folder), folder, STEPS, work)
        plain.append(alone_s)
        under.append(under_s)
        ratios.append(under_s / alone_s - 1)
        table.add_row(
            "50-ms step, plain then holdfast", f"{alone_s * 1e3:.2f} ms, {under_s * 1e3:.2f} ms", f"{ratios[-1]:+.2%}"
        )
    overhead = statistics.median(ratios)
    findings.figures |= {"steady_overhead": overhead, "steady_spread": max(ratios) - min(ratios)}
    findings.goals["steady_under_1_percent"] = overhead < STEADY_GOAL
    return {"plain_step_s": plain, "holdfast_step_s": under}


def main() -> None:
    table = Table("what", "median", "", title=(__doc__ or "").strip())
    findings = Findings()
    runs: dict[str, list[float | None]] = {}
    if executable("holdfast"):
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
            step_cost(Path(folder), table, findings)
            runs = steady(Path(folder), table, findings)
    else:
        findings.skipped["overhead"] = "there is no holdfast beside this python"
    report("overhead", table, findings, runs)


if __name__ == "__main__":
    main()
