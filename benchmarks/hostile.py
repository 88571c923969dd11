"""What hostile and damaged bytes come to: a journal harmed at random, power cut after every write of it, and every
decoder fed with such bytes for as long as there is time.

ARGS is how many seconds the fuzzing takes, on two cores; 60 without it, and 0 for none.
"""

import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.table import Table

from benchmarks._report import FULL, Findings, report
from tests.journal import losing_disk, test_losing_disk, test_torture
from tests.journal.losing_disk import LosingDisk

ROOT = Path(__file__).parents[1]
_MOST_SHOWN = 40_000  # characters of what pytest says of crashes
_HARMED, _CUTS = (2000, 1_000_000) if FULL else (200, 100)


def _harm_journals(base: Path, table: Table, findings: Findings) -> None:
    """A byte changed, a file cut, a block forgotten, a file gone: 2,000 times with BENCH_FULL=1."""
    outcomes = test_torture.strike(base, range(1000, 1000 + _HARMED))
    counted = collections.Counter[str]()
    for (_, _, what), times in outcomes.items():
        counted[what] += times
    _tell("journal harmed", counted, table, findings)


def _cut_power(base: Path, table: Table, findings: Findings) -> None:
    recorder = losing_disk.build_recorder(base)
    if recorder is None:
        findings.skipped["power_cuts"] = "no C compiler: what a process writes cannot be recorded"
        return
    scenes = {"lives": test_losing_disk.LIVES, "set aside": test_losing_disk.SET_ASIDE}
    for name, script in scenes.items():
        living = base / name.replace(" ", "-")
        if name == "lives":
            living.mkdir()
        else:
            test_losing_disk.damaged(living)
        disk = LosingDisk(living)
        ops = losing_disk.record(recorder, living, test_losing_disk.BEGIN + script)
        outcomes = test_losing_disk.cut_everywhere(ops, disk, base / "found", most=_CUTS)
        findings.figures[f"writes_and_syncs_{name.replace(' ', '_')}"] = len(ops)
        _tell(f"power cut, {name}", outcomes, table, findings)


def _tell(what: str, outcomes: "collections.Counter[str]", table: Table, findings: Findings) -> None:
    name = what.replace(", ", "_").replace(" ", "_")
    findings.figures |= {f"{name}_{outcome}": times for outcome, times in sorted(outcomes.items())}
    said = ", ".join(f"{times:,} {outcome}" for outcome, times in sorted(outcomes.items()))
    table.add_row(what, f"{outcomes.total():,}", said)
    findings.goals[f"{name}_no_silent_loss"] = True  # each of them is checked, and raises


def _fuzz(base: Path, seconds: float, table: Table, findings: Findings) -> None:
    if not seconds:
        findings.skipped["fuzzing"] = "ARGS is 0"
        return
    told = base / "fuzzed.json"
    env = {**os.environ, "PYTEST_HOLDFAST_FUZZ": f"{2 * seconds:g}", "PYTEST_HOLDFAST_FUZZ_RECORD": str(told)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "tests/fuzz"]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if not told.exists():
        findings.skipped["fuzzing"] = " ".join(done.stdout.split())[-300:]
        return
    found = json.loads(told.read_text())
    findings.figures |= {"fuzz_core_hours": round(2 * seconds / 3600, 3), "fuzz_s": round(time.monotonic() - began, 1)}
    findings.figures |= {"fuzz_examples": found["examples"], "fuzz_tests": found["tests"]}
    findings.figures["fuzz_crashes"] = len(found["crashed"])
    findings.goals["fuzz_no_crash"] = not found["crashed"]
    if found["crashed"]:  # chances are others the next time, so nobody would find it again by running this once more
        findings.figures["fuzz_crashed"] = ", ".join(found["crashed"])
        print(done.stdout[done.stdout.find("= FAILURES =") :][:_MOST_SHOWN])
    table.add_row(
        "decoders fuzzed", f"{found['examples']:,}", f"{found['tests']} tests, {len(found['crashed'])} crashed"
    )


def main() -> int:
    findings = Findings()
    findings.figures["load_before"] = round(os.getloadavg()[0], 2)
    table = Table("what", "times", "what came of it", title="hostile and damaged bytes")
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        base = Path(folder)
        (base / "harmed").mkdir()
        _harm_journals(base / "harmed", table, findings)
        _cut_power(base, table, findings)
        _fuzz(base, float(sys.argv[1]) if len(sys.argv) > 1 else 60.0, table, findings)
    findings.figures["load_after"] = round(os.getloadavg()[0], 2)
    report("hostile", table, findings)
    return 0 if all(findings.goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
