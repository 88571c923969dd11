"""Stop-time probes: what they take, what they find, and whom they accuse wrongly.

Processes of probes are real, as are the links, which lie between network namespaces (as root). A wrong bit is put into
one product of matrices, at a random place of a random product; what of it vanishes on its way to the result is told
apart. The fleet of the last part is simulated: 64 nodes with noise and hiccups, of which six have lost 3 to 20 %.
"""

import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

import msgspec
import torch
from rich.table import Table

from benchmarks._report import FULL, Findings, report
from holdfast.agent.diagnostics.probe_runner import ProbeTerms, run_probes
from holdfast.agent.probes import SKIPPED, minigpt_model, probe_tools
from holdfast.core.diagnose import fleet_baseline
from holdfast.core.diagnose.probe_assessment import assess_probes
from holdfast.model.probe_findings import Finding
from tests.agent.probes import faults, lab

CLEAN, PROCESSES = 100, 10
LOCAL = 10 if FULL else 4
TRIALS = 200 if FULL else 60
FLEETS = 200 if FULL else 50
BUDGET_S = 2.0
SCATTERS = {"calm": (0.005, 0.005, 0.02), "usual": (0.007, 0.008, 0.03), "rough": (0.01, 0.01, 0.05)}


async def probed(
    level: int, budget_s: float, only: tuple[str, ...] = (), terms: ProbeTerms | None = None
) -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        probes = run_probes(level, budget_s, sys.executable, Path(folder), only=only, terms=terms)
        return [finding async for finding in probes]


async def times(findings: Findings, table: Table) -> None:
    """How long the levels take on this machine's processor, at their full sizes."""
    found = await probed(3, 0.0, terms=ProbeTerms(nice=0))
    for level in (1, 2, 3):
        took_s = sum(f.took_s for f in found if f.level == level)
        findings.figures[f"level {level}, s"] = round(took_s, 2)
        table.add_row(f"level {level}", f"{took_s:.2f} s")
    for f in found:
        if f.value is not None:
            table.add_row(f"  {f.probe} {f.form}", f"{f.value:.4g} {f.unit}")


async def local(findings: Findings, table: Table) -> list[list[Finding]]:
    """Processes of probes as the local fleet has them: niced, with little time."""
    walls, runs = [], []
    for _ in range(LOCAL):
        began = time.monotonic()
        runs.append(await probed(3, BUDGET_S))
        walls.append(time.monotonic() - began)
    late = sum(f.detail == SKIPPED for run in runs for f in run)
    spent = [sum(f.took_s for f in run) for run in runs]
    findings.figures |= {"probes, median s": round(median(spent), 2), "with imports, median s": round(median(walls), 2)}
    findings.goals["all is done within the 2 s of the local fleet"] = late == 0
    table.add_row("local fleet, level 3, niced: median and longest", f"{median(spent):.2f}, {max(spent):.2f} s")
    table.add_row("  with the start of the process", f"{median(walls):.2f}, {max(walls):.2f} s")
    return runs


def clean(findings: Findings, table: Table) -> None:
    """All probes, over and over, on a machine that is well: every run is taken for a node of one fleet."""
    runs: list[list[Finding]] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        for _ in range(PROCESSES):
            command = [sys.executable, "-m", "tests.agent.probes.many", str(CLEAN // PROCESSES), folder]
            told = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            runs += [msgspec.json.decode(line, type=list[Finding]) for line in told.stdout.splitlines()]
    judged = assess_probes({f"n{number}": run for number, run in enumerate(runs)}, {})
    failed = sum(f.ok is False for run in runs for f in run)
    findings.figures |= {"clean runs": len(runs), "false findings": failed, "accused": len(judged.bad)}
    goal = len(runs) == CLEAN and not failed and not judged.bad and not judged.suspects
    findings.goals["no false finding in 100 clean runs"] = goal
    table.add_row(f"{len(runs)} clean runs in {PROCESSES} processes", f"{failed} findings, {len(judged.bad)} accused")


async def spoiled(sound: list[list[Finding]], findings: Findings, table: Table) -> None:
    """One node of four, for real: every product of that process has one wrong bit."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        bad = await probed(3, BUDGET_S, terms=ProbeTerms(env=faults.spoil(Path(folder), faults.ALWAYS)))
    bits = ("gemm_bits", "reference")
    four = {f"n{i}": [f for f in run if f.probe in bits] for i, run in enumerate([*sound[:3], bad])}
    judged = assess_probes(four, {})
    findings.goals["a wrong bit on one node of four is found"] = list(judged.bad) == ["n3"]
    table.add_row("a wrong bit on one node of four", judged.summary_text)


class Wrong:
    """Puts one wrong bit into one product of many."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._real = torch.matmul
        self._left = -1

    def arm(self, products: int) -> None:
        self._left = self._chance.randrange(products)

    def __call__(self, *args: torch.Tensor, **rest: torch.Tensor) -> torch.Tensor:
        out = self._real(*args, **rest)
        if self._left == 0:
            flat = out.detach().view(-1)
            number = self._chance.randrange(flat.numel())
            raw = flat[number : number + 1].view(torch.uint8)
            raw[self._chance.randrange(len(raw))] ^= 1 << self._chance.randrange(8)
        self._left -= 1
        return out


def wrong_bits(findings: Findings, table: Table) -> None:
    """How many of single wrong bits, anywhere, show in the digests."""
    probe_tools.make_deterministic()
    torch.use_deterministic_algorithms(False)  # of the injector's own writes nothing is asked
    chance = random.Random(5)
    wrong = Wrong(chance)
    a, b = (
        probe_tools.float_tensor((256, 256), probe_tools.CPU, 11),
        probe_tools.float_tensor((256, 256), probe_tools.CPU, 12),
    )
    form = minigpt_model.MiniGptForm(width=64, layers=2, length=32)
    ways: dict[str, tuple[int, Callable[[], list[torch.Tensor]]]] = {
        "gemm": (1, lambda: [torch.matmul(a, b)]),
        "reference": (14, lambda: minigpt_model.train_step(form, probe_tools.CPU)),
    }
    for name, (products, work) in ways.items():
        right, seen = probe_tools.tensor_digest(*work()), 0
        torch.matmul = wrong  # type: ignore[assignment]
        for _ in range(TRIALS):
            wrong.arm(products)
            seen += probe_tools.tensor_digest(*work()) != right
        torch.matmul = wrong._real
        findings.figures[f"wrong bits seen, {name}"] = round(seen / TRIALS, 3)
        table.add_row(f"single wrong bits seen by {name}", f"{seen} of {TRIALS}")
    findings.goals["every wrong bit of a product is seen"] = findings.figures["wrong bits seen, gemm"] == 1.0


async def links(findings: Findings, table: Table) -> None:
    if why := lab.missing():
        findings.skipped["links"] = why
        return
    for fault in ("none", lab.SLOW, lab.LOSSY, lab.CORRUPTING):
        with lab.lab(4) as network:
            if fault != "none":
                network.spoil("n3", fault)
            began = time.monotonic()
            answer, waves = await network.pair_test()
        took_s = time.monotonic() - began
        wanted = [] if fault == "none" else ["n3"]
        findings.goals[f"link: {fault}"] = list(answer.bad) == wanted and not answer.unsure
        findings.figures[f"pair test, {fault}, s"] = round(took_s, 1)
        table.add_row(f"pair test, 4 nodes, link {fault}", f"{answer.reason} ({waves} waves, {took_s:.1f} s)")


def fleet(
    chance: random.Random, between: float, within: float, hiccups: float
) -> tuple[dict[str, list[float]], set[str]]:
    """64 nodes that differ a little, each measured 20 times, and the six that have lost something."""
    bad = {f"n{i}" for i in chance.sample(range(64), 6)}
    measured = {}
    for node in (f"n{i}" for i in range(64)):
        middle = 1000 * chance.gauss(1, between) * (1 - chance.uniform(0.03, 0.2) if node in bad else 1)
        measured[node] = [
            middle * chance.gauss(1, within) * (chance.uniform(0.5, 0.9) if chance.random() < hiccups else 1)
            for _ in range(20)
        ]
    return measured, bad


def mean_rule(measured: dict[str, list[float]]) -> set[str]:
    """The usual one: more than 5 % below the mean, which is taken again without those until there are none."""
    kept = dict(measured)
    while True:
        usual = mean(mean(values) for values in kept.values())
        out = [node for node, values in kept.items() if mean(values) < 0.95 * usual]
        if not out:
            return {node for node, values in measured.items() if mean(values) < 0.95 * usual}
        for node in out:
            del kept[node]


def fleets(findings: Findings, table: Table) -> None:
    rules: dict[str, Callable[[dict[str, list[float]]], set[str]]] = {
        "baseline": lambda measured: set(fleet_baseline.below_fleet(measured)),
        "5 % mean rule": mean_rule,
    }
    for scatter, sizes in SCATTERS.items():
        for name, rule in rules.items():
            right = wrong = missed = 0
            for seed in range(FLEETS):
                measured, bad = fleet(random.Random(seed), *sizes)
                found = rule(measured)
                right, wrong, missed = right + len(found & bad), wrong + len(found - bad), missed + len(bad - found)
            precision, recall = right / max(1, right + wrong), right / (right + missed)
            findings.figures |= {f"{name}, {scatter}: precision": precision, f"{name}, {scatter}: recall": recall}
            table.add_row(f"64 nodes, {scatter} noise, {name}", f"precision {precision:.3f}, recall {recall:.3f}")
    figures = findings.figures
    findings.goals["baseline accuses fewer sound nodes than the mean rule"] = all(
        float(figures[f"baseline, {s}: precision"] or 0) >= float(figures[f"5 % mean rule, {s}: precision"] or 0)
        for s in SCATTERS
    )


async def run(findings: Findings, table: Table) -> None:
    await times(findings, table)
    sound = await local(findings, table)
    await spoiled(sound, findings, table)
    await links(findings, table)


def main() -> None:
    findings = Findings()
    table = Table("what", "found", title="probes")
    asyncio.run(run(findings, table))
    clean(findings, table)
    wrong_bits(findings, table)
    fleets(findings, table)
    report("probe", table, findings)


if __name__ == "__main__":
    main()
