"""From the command to the script's first line and first step on the console: holdfast beside torchrun, in turns; and
what `--help` of each command costs."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks._harness import START_LIMIT_S, Job, executable, holdfast
from benchmarks._report import Findings, brief, median, report
from holdfast.cli.command_dispatch import COMMANDS

SCRIPT = Path(__file__).with_name("_first_rank.py")
RANKS, TRIALS = 2, 7
RATIO_GOAL = 1.1
HELP_GOAL_S = 0.15  # of a processor
LOOK_S = 0.005
LINES = {"output": b"first line", "step": b"first step"}
SHAPE = ("--standalone", f"--nproc-per-node={RANKS}")

Runs = dict[str, list[float | None]]


class Seen(msgspec.Struct, frozen=True):
    """Seconds from the command until each line stood on the console; None: it never did."""

    after_s: Mapping[str, float | None]
    total_s: float


def started(name: str) -> Seen:
    """One job from its command to its end."""
    with Job(RANKS) as job:
        launch = [executable("torchrun"), *SHAPE] if name == "torchrun" else holdfast(job.folder / "run", *SHAPE)
        began_at = time.monotonic()
        launcher = job.spawn([*launch, str(SCRIPT)])
        after_s = watched(job.folder / "launcher0.log", began_at)
        code = launcher.wait(START_LIMIT_S)
        if code or None in after_s.values():
            raise RuntimeError(f"{name} ended with code {code}:\n{job.last_words()}")
        return Seen(after_s, time.monotonic() - began_at)


def watched(console: Path, began_at: float) -> dict[str, float | None]:
    after_s: dict[str, float | None] = dict.fromkeys(LINES)
    while None in after_s.values() and time.monotonic() < began_at + START_LIMIT_S:
        shown, now = console.read_bytes(), time.monotonic()
        for line in LINES:
            if after_s[line] is None and LINES[line] in shown:
                after_s[line] = now - began_at
        time.sleep(LOOK_S)
    return after_s


def help_s(*command: str) -> float:
    """Seconds of a processor that a command takes for its help."""
    pid = os.posix_spawn(
        command[0],
        [*command, "--help"],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, used = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)} --help ended with code {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime


def helped(holdfast: str) -> dict[str, float]:
    """The least of a few, of each command: what a busy machine adds is not asked for."""
    commands = {"holdfast": (holdfast,)} | {f"holdfast {name}": (holdfast, name) for name in COMMANDS}
    return {name: min(help_s(*command) for _ in range(TRIALS)) for name, command in commands.items()}


def judge_helps(findings: Findings, helps: Mapping[str, float]) -> None:
    findings.figures |= {"help_least_cpu_s": min(helps.values()), "help_most_cpu_s": max(helps.values())}
    findings.figures["help_most_of"] = max(helps, key=lambda name: helps[name])
    findings.goals[f"every_help_under_{HELP_GOAL_S:g}_cpu_s"] = max(helps.values()) < HELP_GOAL_S


def judge(runs: Runs, loads: Sequence[float]) -> Findings:
    findings = Findings(figures={f"{name.replace(' ', '_')}_s": median(times) for name, times in runs.items()})
    for line in LINES:
        theirs, ours = median(runs[f"torchrun {line}"]), median(runs[f"holdfast {line}"])
        ratio = ours / theirs if ours and theirs else None
        findings.figures[f"first_{line}_ratio"] = ratio
        findings.goals[f"first_{line}_ratio_at_most_{RATIO_GOAL:g}"] = ratio is not None and ratio <= RATIO_GOAL
    findings.figures |= {"load_least": min(loads), "load_most": max(loads)}
    return findings


def main() -> None:
    table = Table("launcher", "until", "median s", "all, s", title=(__doc__ or "").strip())
    holdfast_at = executable("holdfast")
    if not holdfast_at:
        report("first_output", table, Findings(skipped={"holdfast": "there is no holdfast beside this python"}))
        return
    launchers = ("torchrun", "holdfast")
    runs: Runs = {f"{name} {line}": [] for name in launchers for line in (*LINES, "end")}
    loads = []
    for name in launchers:
        started(name)  # so that neither reads torch from a cold disk
    for turn in range(TRIALS):
        for name in launchers if turn % 2 == 0 else launchers[::-1]:
            loads.append(os.getloadavg()[0])
            seen = started(name)
            for line, after_s in seen.after_s.items():
                runs[f"{name} {line}"].append(after_s)
            runs[f"{name} end"].append(seen.total_s)
    for what, times in runs.items():
        name, line = what.split()
        until = "its end" if line == "end" else f"first {line}"
        table.add_row(name, until, brief(median(times)), " ".join(brief(time) for time in times))
    findings = judge(runs, loads)
    judge_helps(findings, helps := helped(holdfast_at))
    for command in sorted(helps, key=lambda name: -helps[name])[:3]:
        table.add_row(command, "its help, CPU", brief(helps[command]), "the least of " + str(TRIALS))
    report("first_output", table, findings, runs)


if __name__ == "__main__":
    main()
