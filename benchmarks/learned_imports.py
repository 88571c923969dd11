"""What it is worth that a run learns by itself what its script imports: a Trainer of transformers on two gloo ranks,
restarted before that is known and after, and run once more, when it is known from the start."""

import importlib.metadata
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.table import Table

from benchmarks._exact_scene import records_of
from benchmarks._harness import Job, holdfast
from benchmarks._report import FULL, Findings, brief, median, report
from holdfast.core.incident.incident_text import phases_s
from holdfast.model.incident_record import Record

SCRIPT = Path(__file__).with_name("_learned_rank.py")
RANKS = 2
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3" if FULL else "1"))
LIMIT_S = 240.0
IMPORTS = "imports and groups"
RATIO_GOAL = 0.2
T = TypeVar("T")
LEARNED = re.compile(r"zygote: (\d+) modules")
FIRST_STEP = re.compile(r"training: first step after ([\d.]+) s")


class Trained:
    """One run of the script."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.run_dir = job, job.folder / f"run-{number}"
        self.console = job.folder / f"launcher{len(job.launchers)}.log"
        flags = ("--set=probe.allow=false", f"--nproc-per-node={RANKS}")
        self.launcher = job.spawn([*holdfast(self.run_dir, *flags), str(SCRIPT)], {"HOLDFAST_HOME": str(job.folder)})
        told = self.found(lambda: FIRST_STEP.findall(self.console.read_text()), "a first step")
        self.first_step_s = float(told[0])

    def found(self, look: Callable[[], T], what: str) -> T:
        """What `look` finds once it is true."""
        found = self.job.wait(lambda: look() or None, LIMIT_S)
        if found is None:
            raise RuntimeError(f"waited in vain for {what}:\n{self.job.last_words()}")
        return found

    def modules(self) -> int:
        """How many modules the newest zygote has."""
        logs = "".join(path.read_text() for path in self.run_dir.glob("nodes/*/*.log"))
        return int((LEARNED.findall(logs) or [0])[-1])

    def restart(self) -> Record:
        """Kill a rank; what the incident cost."""
        known = len(records_of(self.run_dir))
        self.job.kill(int((self.run_dir / f"logs/gen-{known + 1}/rank-1/pid").read_text()))
        return self.found(lambda: records_of(self.run_dir)[known:], "the end of the incident")[0]

    def end(self) -> None:
        self.launcher.send_signal(signal.SIGTERM)
        self.launcher.wait(LIMIT_S)


def measure(runs: dict[str, list[float | None]]) -> None:
    with Job(RANKS) as job:
        first = Trained(job, 1)
        before = first.modules()
        for way in ("before it is known", "once it is known"):
            if way == "once it is known":
                first.found(lambda: first.modules() > before + 100, "what the script imports in a zygote")
                time.sleep(5.0)  # the next ranks are forked in advance
            record = first.restart()
            runs[f"restart {way}"].append(round(record.resumed_at - record.alarm_at, 2))
            runs[f"{IMPORTS} {way}"].append(round(phases_s(record).get(IMPORTS, 0.0), 2))
            print(f"  {record.sentence}", flush=True)
        first.end()
        second = Trained(job, 2)
        second.end()
        runs["first step of the first run"].append(first.first_step_s)
        runs["first step of the next run"].append(second.first_step_s)


def main() -> None:
    table = Table("what", "median, s", "all, s", title=(__doc__ or "").strip())
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        why = "it is not installed; make test-full has it"
        report("learned_imports", table, Findings(skipped={"transformers": why}))
        return
    ways = ("before it is known", "once it is known")
    names = [f"{what} {way}" for what in ("restart", IMPORTS) for way in ways]
    names += ["first step of the first run", "first step of the next run"]
    runs: dict[str, list[float | None]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        measure(runs)
    findings = Findings(figures={f"{name}, s": median(took) for name, took in runs.items()})
    findings.figures["transformers"] = version
    slow_s, quick_s = (median(runs[f"{IMPORTS} {way}"]) or 0.0 for way in ways)
    findings.goals[f"imports_at_most_{RATIO_GOAL:g}_once_known"] = 0 < slow_s and quick_s <= RATIO_GOAL * slow_s
    for name, took in runs.items():
        table.add_row(name, brief(median(took)), " ".join(brief(one) for one in took))
    report("learned_imports", table, findings, runs)


if __name__ == "__main__":
    main()
