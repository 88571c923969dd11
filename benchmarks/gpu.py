"""On a GPU: SIGKILL of a rank -> its memory freed -> forked, CUDA up, first step, against a fresh interpreter.

The rank holds 70 % of the device's memory, so its successor only comes up if that was really given back.
"""

import statistics
import sys
import time
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks._harness import Event, Fault, Job
from benchmarks._report import FULL, Findings, report

SCRIPT = Path(__file__).with_name("_train_cuda.py")
KILLS = 8 if FULL else 4
PHASES = ("reaped", "start", "imported", "cuda_up", "held", "pg_up", "step")


class Recovery(msgspec.Struct, frozen=True):
    """Seconds after the kill at which each phase was reached, and when the device's memory was free."""

    at_s: dict[str, float]
    freed_s: float


def used_bytes() -> int:
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def recover(job: Job) -> Recovery:
    """Kill the rank and watch the device and the rank's successor."""
    victim = job.pid_of(0)
    fault = job.fault()
    held_bytes = used_bytes()
    job.kill(victim)
    freed_s = reaped_s = 0.0
    until = time.time() + 60.0
    while (not freed_s or not reaped_s) and time.time() < until:
        if not freed_s and used_bytes() < 0.5 * held_bytes:
            freed_s = time.time() - fault.at
        if not reaped_s and not Path(f"/proc/{victim}").exists():
            reaped_s = time.time() - fault.at
        time.sleep(0.001)
    if job.wait_steps(3, fault, limit_s=120.0) is None:
        raise SystemExit(f"the job did not come back:\n{job.last_words(40)}")
    return Recovery(at_s={"reaped": reaped_s, **_phases(job.events(), fault)}, freed_s=freed_s)


def _phases(events: list[Event], fault: Fault) -> dict[str, float]:
    found: dict[str, float] = {}
    for event in sorted((e for e in events if e.pid not in fault.before), key=lambda e: e.at):
        found.setdefault(event.kind, event.at - fault.at)
    return found


def measure(options: list[str]) -> list[Recovery]:
    launch = [sys.executable, "-m", "holdfast.cli", "run", "--standalone", "--nproc-per-node=1", "--max-restarts=99"]
    with Job(1, script=SCRIPT) as job:
        job.start([*launch, *options])
        if job.wait_steps(3) is None:
            raise SystemExit(f"the job did not start:\n{job.last_words(40)}")
        recoveries = []
        for _ in range(KILLS):
            recoveries.append(recover(job))
            time.sleep(1.0)
        return recoveries


def middle(recoveries: list[Recovery], phase: str) -> float:
    return statistics.median(r.at_s[phase] for r in recoveries)


def main() -> None:
    findings = Findings()
    table = Table(title="SIGKILL of a rank on a GPU: seconds after the kill, medians")
    for column in ("", *PHASES, "memory freed"):
        table.add_column(column, justify="right")
    if not Path("/proc/driver/nvidia/gpus").exists():
        findings.skipped["gpu"] = "no CUDA device on this machine"
        report("gpu", table, findings)
        return
    ways = {"forked": measure([]), "fresh": measure(["--no-zygote"])}
    for way, recoveries in ways.items():
        freed_s = statistics.median(r.freed_s for r in recoveries)
        table.add_row(way, *(f"{middle(recoveries, phase):.2f}" for phase in PHASES), f"{freed_s:.2f}")
        findings.figures |= {f"{way}_{phase}_s": round(middle(recoveries, phase), 3) for phase in PHASES}
        findings.figures[f"{way}_freed_s"] = round(freed_s, 3)
    ratio = middle(ways["fresh"], "step") / middle(ways["forked"], "step")
    findings.figures["ratio"] = round(ratio, 2)
    findings.goals["memory_freed_before_successor"] = all(r.freed_s < r.at_s["held"] for r in ways["forked"])
    findings.goals["forked_faster_than_fresh"] = ratio > 1
    runs = {way: [r.at_s["step"] for r in recoveries] for way, recoveries in ways.items()}
    report("gpu", table, findings, {k: list(v) for k, v in runs.items()})


if __name__ == "__main__":
    main()
