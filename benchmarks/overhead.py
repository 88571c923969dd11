"""What running under holdfast costs: one call of holdfast.step, and a 50-ms step beside the same under plain python."""

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from benchmarks._harness import START_LIMIT_S, Job, executable, holdfast
from benchmarks._report import FULL, Findings, report

HERE = Path(__file__).parent
ALONE = ["--standalone", "--nproc-per-node=1"]
STEP_S = 0.05
STEPS = 1200 if FULL else 300
COLD_STEPS = 10  # caches, allocator and lazy imports settle
LOOK_S = 10.0
STEP_GOAL_US, STEADY_GOAL = 5.0, 0.01


def wait_json(job: Job, path: Path, limit_s: float = START_LIMIT_S) -> Any:
    """What the script of this job leaves in the file at its end."""
    if job.wait(lambda: all(launcher.poll() == 0 for launcher in job.launchers) or None, limit_s) is None:
        raise RuntimeError(f"the script did not come to its end:\n{job.last_words()}")
    return json.loads(path.read_text())


def step_cost(table: Table, findings: Findings) -> None:
    for name in ("attached", "alone"):
        with Job(1) as job:
            to = job.folder / "calls.json"
            launch = holdfast(job.folder / "run", *ALONE) if name == "attached" else [sys.executable]
            job.spawn([*launch, str(HERE / "_step_calls.py"), str(to)])
            found = wait_json(job, to)
        if found["attached"] != (name == "attached"):
            raise RuntimeError(f"holdfast.step was to be timed {name}, and was not")
        findings.figures[f"step_call_{name}_us"] = found["median_us"]
        findings.figures[f"step_call_{name}_p99_us"] = found["p99_us"]
        table.add_row(f"holdfast.step, {name}", f"{found['median_us']:.2f} us", f"p99 {found['p99_us']:.2f} us")
        findings.goals.setdefault("step_call_under_5_us", found["median_us"] < STEP_GOAL_US)


def start_steps(job: Job, launch: Sequence[str], size: tuple[int, int], pipes: tuple[Path, Path]) -> int:
    """Start so many steps of so much work, and wait until they wait for the token; returns the pid of their process."""
    to = job.folder / "steps.json"
    counts = [f"--steps={size[0]}", f"--work={size[1]}"]
    job.spawn([*launch, str(HERE / "_steady.py"), f"--to={to}", *counts, f"--mine={pipes[0]}", f"--next={pipes[1]}"])
    started = to.with_suffix(".pid")
    if not job.wait(lambda: (started.exists() and started.read_text()) or None, START_LIMIT_S):
        raise RuntimeError(f"the script never came to its first step:\n{job.last_words()}")
    return int(started.read_text())


def pipe(job: Job) -> Path:
    path = job.folder / "turn"
    os.mkfifo(path)
    return path


def hand_token(first: Path) -> None:
    fd = os.open(first, os.O_WRONLY)
    os.write(fd, b".")
    os.close(fd)


def calibrated() -> int:
    """How much work makes a step of the wanted length here; found once, so that both sides do the same."""
    guess = 50
    with Job(1) as job:
        turn = pipe(job)
        start_steps(job, [sys.executable], (40, guess), (turn, turn))
        hand_token(turn)
        took = wait_json(job, job.folder / "steps.json")
    return max(1, int(guess * STEP_S / statistics.median(took[COLD_STEPS:])))


def cpu_beside(job: Job, rank: int) -> float:
    """The share of one core that all processes of the job but the rank itself take while it trains."""
    before_s = {pid: took_s for pid in job.pids() if pid != rank and (took_s := cpu_s(pid)) is not None}
    time.sleep(LOOK_S)
    after_s = {pid: cpu_s(pid) for pid in before_s}
    return sum(took_s - before_s[pid] for pid, took_s in after_s.items() if took_s is not None) / LOOK_S


def cpu_s(pid: int) -> float | None:
    """The processor time of a process; None if it has ended, as one that only imports does."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:2])
    except psutil.NoSuchProcess:
        return None


def take_turns() -> tuple[list[float], list[float], float]:
    """The same steps, one plain and one under holdfast in turn, and what holdfast's own processes took meanwhile.

    Step by step, because a machine with other things to do changes its pace: so it changes it for both.
    """
    size = STEPS, calibrated()
    with Job(1) as plain, Job(1) as under:
        pipes = pipe(plain), pipe(under)
        start_steps(plain, [sys.executable], size, pipes)
        rank = start_steps(under, holdfast(under.folder / "run", *ALONE), size, pipes[::-1])
        hand_token(pipes[0])
        beside = cpu_beside(under, rank)
        limit_s = START_LIMIT_S + 10 * STEPS * STEP_S
        return *(wait_json(job, job.folder / "steps.json", limit_s)[COLD_STEPS:] for job in (plain, under)), beside


def steady(table: Table, findings: Findings) -> None:
    plain, under, beside = take_turns()
    medians = [1e3 * statistics.median(steps) for steps in (plain, under)]
    ratios = [mine / theirs - 1 for theirs, mine in zip(plain, under, strict=True)]
    overhead, quartiles = statistics.median(ratios), statistics.quantiles(ratios)
    error = 0.93 * (quartiles[2] - quartiles[0]) / math.sqrt(len(ratios))  # of a median, for a normal spread
    findings.figures |= {"plain_step_ms": medians[0], "holdfast_step_ms": medians[1]}
    findings.figures |= {"steady_overhead": overhead, "steady_error": error, "cpu_beside": beside}
    table.add_row("step, plain and under holdfast", f"{medians[0]:.2f} and {medians[1]:.2f} ms", f"{len(plain)} each")
    table.add_row("overhead, step by step", f"{overhead:+.2%}", f"+- {error:.2%}")
    table.add_row("processor time of holdfast's own processes", f"{beside:.2%}", "of one core")
    if abs(overhead - STEADY_GOAL) > error:  # the goal is outside of what the error leaves open
        findings.goals["steady_under_1_percent"] = overhead < STEADY_GOAL
    else:
        findings.skipped["steady_under_1_percent"] = f"the machine is too busy to tell: {overhead:+.2%} +- {error:.2%}"


def main() -> None:
    table = Table("what", "median", "", title=(__doc__ or "").strip())
    findings = Findings()
    if executable("holdfast"):
        step_cost(table, findings)
        steady(table, findings)
    else:
        findings.skipped["overhead"] = "there is no holdfast beside this python"
    report("overhead", table, findings)


if __name__ == "__main__":
    main()
