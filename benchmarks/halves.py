"""What passes in two halves and early steps are worth in a pipeline that has lost a worker, and what splitting costs.

Four stages and two pipelines over gloo: all eight workers, and seven by the plan that rerouting proposes without one.
Parts of layers' passes are sleeps of 20 ms, so two cores hide nothing; real layers have parts of unequal lengths. A
layout is the order of the passes with parts of equal length, and neither messages nor processors. BENCH_ROUNDS=0 leaves
the steps out, which say nothing on a busy machine.
"""

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.table import Table
from torch import nn

from benchmarks._halves_rank import LAYERS, MICROBATCHES, PIPELINES, STAGES, WAYS, plan_without, train_rank
from benchmarks._harness import free_port
from benchmarks._report import FULL, Findings, report
from holdfast.client.elastic.backward_halves import BackwardHalves, Island
from holdfast.client.elastic.layer_state import LayerUnit
from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.task_order import time_tasks
from holdfast.model.pipeline_routes import PipelineJob

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "2" if FULL else "1"))
STEPS = 3
LIMIT_S = 300.0
SCENES = {"all": STAGES * PIPELINES, "lost": STAGES * PIPELINES - 1}
JOB = PipelineJob(layers=LAYERS, microbatches=MICROBATCHES, stages=STAGES, ordered=True)
SPLIT_PASSES = 300


def time_scene(scene: str, folder: Path) -> list[tuple[str, float, str]]:
    """Return for each way, in turns, what a step takes and what the state comes to."""
    into, port = folder / scene, str(free_port())
    place = {"WORLD_SIZE": str(SCENES[scene]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "1"}
    forks = multiprocessing.get_context("fork")  # torch is imported once
    places = [place | {"RANK": str(rank)} for rank in range(SCENES[scene])]
    ranks = [forks.Process(target=train_rank, args=(into, mine, STEPS, ROUNDS)) for mine in places]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(LIMIT_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    if any(rank.exitcode for rank in ranks):
        raise RuntimeError(f"ranks ended with {[rank.exitcode for rank in ranks]}")
    found: list[tuple[str, float, str]] = [tuple(one) for one in json.loads(into.read_text())]
    return found


def lay_out(lost: int | None) -> float:
    """Return how much longer whole passes take than halves if every part takes the same time and nothing else does."""
    plan = first_plan(JOB, SCENES["all"]) if lost is None else plan_without(JOB, lost)
    whole, halves = (max(one.ends for one in time_tasks(plan.routes, halves=split)) for split in (False, True))
    return whole / halves


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        found: torch.Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))
        return found


def time_split(width: int) -> tuple[float, float]:
    """Return the time of a processor for the backward pass of a layer whole, and in halves, in milliseconds."""
    unit, halves = LayerUnit(1, lambda: Block(width), torch.optim.SGD, 0), BackwardHalves()
    took: dict[bool, list[float]] = {False: [], True: []}
    for number in range(SPLIT_PASSES):
        for split in (False, True):
            given = torch.randn(2, 16, width, requires_grad=True)
            made = unit.module(given)
            gradient, since = torch.ones_like(made), time.thread_time()
            if split:
                rest = halves.go_back(unit, Island(1, given, made), gradient).rest
                assert rest is not None
                rest()
            else:
                torch.autograd.backward(made, gradient)
                unit.take_gradients()
            if number >= SPLIT_PASSES // 10:
                took[split].append(1000 * (time.thread_time() - since))
    return statistics.median(took[False]), statistics.median(took[True])


def add_steps(findings: Findings, table: Table) -> dict[str, list[float | None]]:
    """Time steps in both scenes, and return the single measurements."""
    runs: dict[str, list[float | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        made = {scene: time_scene(scene, Path(folder)) for scene in SCENES}
    for scene, found in made.items():
        median_s = {way: statistics.median(took for one, took, _ in found if one == way) for way in WAYS}
        ratio = median_s["whole"] / median_s["halves"]
        table.add_row(f"{SCENES[scene]} workers, s", *(f"{one:.3f}" for one in median_s.values()), f"{ratio:.3f}")
        for way, took in median_s.items():
            findings.figures[f"{scene}: {way}, s"] = round(took, 4)
            runs[f"{scene}: {way}"] = [one_s for one, one_s, _ in found if one == way]
        findings.figures[f"{scene}: whole / halves"] = round(ratio, 3)
        for kind in ("whole", "halves"):
            early = median_s[kind] / median_s[f"{kind}, early"]
            findings.figures[f"{scene}: {kind} / {kind}, early"] = round(early, 3)
        findings.goals[f"{scene}: the same bits in all ways"] = len({digest for *_, digest in found}) == 1
        if scene == "lost":
            findings.goals["a worker is lost: halves are faster"] = ratio > 1
    return runs


def main() -> int:
    torch.set_num_threads(1)
    findings, runs = Findings(), dict[str, list[float | None]]()
    table = Table("of a step", *WAYS, "whole / halves", title=(__doc__ or "").partition("\n")[0])
    for name, lost in [("all workers", None), *((f"stage {stage} lost", STAGES + stage) for stage in range(STAGES))]:
        findings.figures[f"layout, {name}: whole / halves"] = round(lay_out(lost), 3)
        table.add_row(f"layout, {name}", "", "", "", "", f"{lay_out(lost):.3f}")
    whole_ms, split_ms = time_split(64)
    table.add_row("a layer's backward pass, ms", f"{whole_ms:.2f}", f"{split_ms:.2f}", "", "", "")
    findings.figures |= {"a layer whole, ms": round(whole_ms, 3), "a layer in halves, ms": round(split_ms, 3)}
    findings.figures["load"] = round(os.getloadavg()[0], 1)
    if ROUNDS:
        runs = add_steps(findings, table)
    else:
        findings.skipped["steps"] = "BENCH_ROUNDS=0"
    report("halves", table, findings, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
