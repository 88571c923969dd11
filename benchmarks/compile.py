"""The first step of a compiled GPT: the first of all, after a restart in place, and on the host of a standby."""

import os
import shutil
import subprocess
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks._harness import STANDBY_LIMIT_S, Job, free_port, holdfast
from benchmarks._report import Findings, brief, report

SCRIPT = Path(__file__).with_name("_compile_rank.py")
COMPILE_LIMIT_S = 900.0  # a compiler on a busy machine
RATIO_GOAL = 0.5  # of the first step of all
LIVES = {"cold": "the first of all", "warm": "restarted in place", "standby": "on a standby's host"}


class FirstStep(msgspec.Struct, frozen=True):
    pid: int
    first_s: float
    compiled: int  # graphs that were not in the cache


def await_first_step(job: Job, life: int) -> FirstStep:
    def look() -> FirstStep | None:
        path = job.folder / f"seen-{life}.json"
        return msgspec.json.decode(path.read_bytes(), type=FirstStep) if path.exists() else None

    if (found := job.wait(look, COMPILE_LIMIT_S)) is None:
        raise RuntimeError(f"life {life} made no step:\n{job.last_words()}")
    return found


def join_host(job: Job, name: str, port: int) -> Path:
    """Start a host with a temporary folder of its own, as another machine would have; return its run directory."""
    own = job.folder / name
    (own / "tmp").mkdir(parents=True)
    flags = (f"--rdzv-endpoint=127.0.0.1:{port}", "--nnodes=1", "--standbys=1", "--nproc-per-node=1")
    quiet = ("--set", "probe.allow=false")
    env = {"TMPDIR": str(own / "tmp"), "HOLDFAST_HOME": str(job.folder / "home"), "HOLDFAST_HOST_ID": name}
    job.spawn([*holdfast(own / "run", *flags, *quiet), str(SCRIPT), str(job.folder)], env)
    return own / "run"


def await_brought(job: Job, run: Path) -> None:
    """Wait until a standby is ready and has what the other host has compiled."""
    log = job.folder / "launcher0.log"

    def look() -> bool | None:
        brought = any("compiled code: brought" in path.read_text() for path in run.glob("*/nodes/*/agent.log"))
        return True if brought and _is_ready(log.read_text()) else None

    if not job.wait(look, STANDBY_LIMIT_S):
        raise RuntimeError(f"no standby has the compiled code:\n{job.last_words()}")


def _is_ready(console: str) -> bool:
    [line] = [line for line in console.splitlines() if "run directory " in line][:1]
    log = Path(line.split("run directory ")[1]) / "controller.log"
    return "is ready as a standby" in log.read_text()


def measure() -> list[FirstStep]:
    with Job(1) as job:
        port = free_port()
        leader = join_host(job, "first", port)
        found = [await_first_step(job, 0)]
        job.kill(found[0].pid)
        found.append(await_first_step(job, 1))
        await_brought(job, join_host(job, "second", port))
        [run_dir] = leader.iterdir()
        [node] = (
            path.name for path in (run_dir / "nodes").iterdir() if path.is_dir() and not path.name.startswith(".")
        )
        evict = [*holdfast(run_dir)[:-2], "evict", node, "--run", str(run_dir)]
        env = {**os.environ, "HOLDFAST_HOME": str(job.folder / "home")}
        subprocess.run(evict, check=True, stdout=subprocess.DEVNULL, cwd=job.folder, env=env)
        found.append(await_first_step(job, 2))
        (job.folder / "finish").touch()
        for launcher in job.launchers:
            launcher.wait(STANDBY_LIMIT_S)
    return found


def main() -> None:
    table = Table("first step", "s", "of the first", "graphs compiled", title=(__doc__ or "").strip())
    if not shutil.which("g++"):
        report(
            "compile", table, Findings(skipped={"compile": "there is no g++, which torch needs to compile for CPUs"})
        )
        return
    before = os.getloadavg()[0]
    findings = Findings()
    steps = dict(zip(LIVES, measure(), strict=True))
    for life, step in steps.items():
        ratio = step.first_s / steps["cold"].first_s
        table.add_row(LIVES[life], brief(step.first_s), brief(ratio), str(step.compiled))
        findings.figures |= {f"{life}_first_step_s": step.first_s, f"{life}_graphs_compiled": step.compiled}
        if life != "cold":
            findings.figures[f"{life}_ratio"] = ratio
            findings.goals[f"{life}_ratio_at_most_{RATIO_GOAL:g}"] = ratio <= RATIO_GOAL
            findings.goals[f"{life}_compiles_no_graph"] = step.compiled == 0
    findings.figures |= {"load_before": before, "load_after": os.getloadavg()[0]}
    report("compile", table, findings)


if __name__ == "__main__":
    main()
