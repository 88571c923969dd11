"""What watching costs: processor time of an agent whose job rests, with all sources and without, and of a step."""

import os
import statistics
import time
from pathlib import Path

import psutil
from rich.table import Table

from benchmarks._harness import START_LIMIT_S, Job, executable, holdfast
from benchmarks._report import FULL, Findings, report
from benchmarks.overhead import ALONE, COLD_STEPS, STEP_S, calibrated, hand_token, pipe, start_steps, wait_json

HERE = Path(__file__).parent
REST_S = 120.0 if FULL else 40.0
STEPS = 1200 if FULL else 200
CORE_GOAL, STEP_GOAL = 0.005, 0.003
SOURCES = ("kernel_s", "gpu_s", "host_s", "network_s")
RARELY = [f"--set=health.{name}=100000" for name in SOURCES]
SETTLE_S = 5.0  # first readings, the zygote's second warming


def agent_of(job: Job) -> int | None:
    for pid in job.pids():
        try:
            if "holdfast.agent.main" in psutil.Process(pid).cmdline():
                return pid
        except psutil.NoSuchProcess:
            continue
    return None


def cpu_s(pid: int) -> float:
    """Processor time of a process in nanoseconds' precision, unlike what `ps` shows."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def at_rest(flags: list[str]) -> float:
    """The part of one core that an agent takes while its rank does nothing."""
    with Job(1) as job:
        started = job.folder / "run"
        job.spawn([*holdfast(started, *ALONE, *flags), str(HERE / "_idle.py")])
        if not job.wait(lambda: next(started.glob("logs/gen-1/rank-0/pid"), None), START_LIMIT_S):
            raise RuntimeError(f"the job never started:\n{job.last_words()}")
        pid = agent_of(job)
        if pid is None:
            raise RuntimeError("there is no agent")
        time.sleep(SETTLE_S)
        before_s, begun_at = cpu_s(pid), time.monotonic()
        time.sleep(REST_S)
        return (cpu_s(pid) - before_s) / (time.monotonic() - begun_at)


def take_turns() -> list[float]:
    """By how much a step is longer with sources read at their pace than without, the two taking turns."""
    size = STEPS, calibrated()
    with Job(1) as off, Job(1) as on:
        pipes = pipe(off), pipe(on)
        start_steps(off, holdfast(off.folder / "run", *ALONE, *RARELY), size, pipes)
        start_steps(on, holdfast(on.folder / "run", *ALONE), size, pipes[::-1])
        hand_token(pipes[0])
        limit_s = START_LIMIT_S + 20 * STEPS * STEP_S
        without, watched = (wait_json(job, job.folder / "steps.json", limit_s)[COLD_STEPS:] for job in (off, on))
    return [mine / theirs - 1 for theirs, mine in zip(without, watched, strict=True)]


def main() -> None:
    table = Table("what", "figure", "", title=(__doc__ or "").strip())
    findings = Findings()
    if not executable("holdfast"):
        findings.skipped["monitor"] = "there is no holdfast beside this python"
        report("monitor", table, findings)
        return
    with_sources, without = at_rest([]), at_rest(RARELY)
    table.add_row("agent at rest, beats and all sources", f"{with_sources:.3%}", f"of one core, {REST_S:g} s")
    table.add_row("the same, sources not read again", f"{without:.3%}", "of one core")
    ratios = take_turns()
    overhead, quartiles = statistics.median(ratios), statistics.quantiles(ratios)
    error = 0.93 * (quartiles[2] - quartiles[0]) / len(ratios) ** 0.5  # of a median, for a normal spread
    table.add_row("a step, step by step", f"{overhead:+.3%}", f"+- {error:.3%}")
    # Whatever the sources take, a step on this machine cannot lose more than their share of all its cores.
    bound = max(0.0, with_sources - without) / (os.cpu_count() or 1)
    table.add_row("what a step loses at most to them", f"{bound:.3%}", "their processor time, over all cores")
    findings.figures |= {"agent_cpu": with_sources, "agent_cpu_without": without, "load": os.getloadavg()[0]}
    findings.figures |= {"step_overhead": overhead, "step_error": error, "step_bound": bound}
    findings.goals["agent_under_half_a_percent_of_a_core"] = with_sources < CORE_GOAL
    findings.goals["sources_under_0.3_percent_of_step_time"] = bound < STEP_GOAL
    if abs(overhead - STEP_GOAL) > error:
        findings.goals["step_overhead_under_0.3_percent"] = overhead < STEP_GOAL
    else:
        findings.skipped["step_overhead"] = f"the machine is too busy to tell: {overhead:+.2%} +- {error:.2%}"
    report("monitor", table, findings)


if __name__ == "__main__":
    main()
