"""What going on in kept processes is worth at scale: restarts, survivors, single policies, and choosing among them."""

import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

import msgspec
from rich.table import Table

from benchmarks._report import FULL, Figure, Findings, report
from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.plan_choice import choose_plan
from holdfast.model.pipeline_routes import PipelineJob, Semantics
from holdfast.sim.scale import failure_mixes, policy_study, price_sheet
from holdfast.sim.scale.elastic_recovery import ELASTIC, SINGLE, expected_costs, policies_of, situation_of
from holdfast.sim.scale.failure_schedule import ScaleSetup
from holdfast.sim.scale.holdfast_policy import NAME
from holdfast.sim.scale.scale_result import ScaleResult
from holdfast.sim.scale.scale_state import ScaleState
from holdfast.sim.scale.survivor_recovery import SURVIVORS

WAYS = (NAME, "byterobust", SURVIVORS, ELASTIC, *SINGLE)
FEW = (NAME, SURVIVORS, ELASTIC, "replace", "hybrid")
SEEDS = 5 if FULL else 1
LONGER = 5 if FULL else 1  # times as many days
REGRET = 0.001  # points of ETTR by which the best single policy, known afterwards, may be ahead
LIMIT_S = float(os.environ.get("BENCH_DURATION_S", "690"))  # nothing more is begun after so long


class World(msgspec.Struct, frozen=True, kw_only=True):
    """A job, its failures, the policies that face them, and prices that are doubted."""

    mix: str
    setup: ScaleSetup
    ways: tuple[str, ...] = WAYS
    doubts: dict[str, float] = {}


LARGEST = ScaleSetup(gpus=131072, days=0.2 * LONGER)
WORLDS = {
    "9600": World(mix="byterobust", setup=ScaleSetup(gpus=9600, days=10.0 * LONGER)),
    "9600 without standbys": World(mix="byterobust", setup=ScaleSetup(gpus=9600, days=10.0 * LONGER, standbys=0)),
    "16384": World(mix="llama3", setup=ScaleSetup(gpus=16384, days=4.0 * LONGER)),
    "131072": World(mix="llama3", setup=LARGEST),
    "131072 groups as slow as FT-HSDP's stall": World(mix="llama3", setup=LARGEST, ways=FEW, doubts={"groups": 3.3}),
    "131072 no groups can stay": World(mix="llama3", setup=LARGEST, ways=FEW, doubts={"stage_groups": 27.0}),
}


def play(world: str, way: str, seed: int) -> ScaleResult:
    one = WORLDS[world]
    sheet = price_sheet.scale_sheet(price_sheet.load_sheet(), one.doubts)
    setup = msgspec.structs.replace(one.setup, seed=seed)
    return policy_study.play_policy(way, setup, failure_mixes.load_mix(one.mix), sheet)[0]


def main() -> None:
    start, skipped = time.monotonic(), dict[str, str]()
    table = Table(title=(__doc__ or "").strip())
    for column in ("world", "policy", "ETTR", "incidents", "lost most to"):
        table.add_column(column, justify="right" if column in ("ETTR", "incidents") else "left")
    figures: dict[str, Figure] = {}
    runs: dict[str, list[float | None]] = {}
    with ProcessPoolExecutor(2) as pool:
        for name, world in WORLDS.items():
            if time.monotonic() - start > LIMIT_S:
                skipped[name] = "BENCH_DURATION_S was over"
                continue
            pairs = [(way, seed) for way in world.ways for seed in range(1, SEEDS + 1)]
            played = pool.map(play, *zip(*((name, way, seed) for way, seed in pairs), strict=True))
            results: dict[str, list[ScaleResult]] = {}
            for (way, seed), one in zip(pairs, played, strict=True):
                results.setdefault(way, []).append(one)
                print(f"{name}: {way}, seed {seed}: {one.ettr:.3%}", file=sys.stderr, flush=True)
            tell_world(name, results, table, figures)
            runs |= {f"{name}: {way}": [round(one.ettr, 6) for one in found] for way, found in results.items()}
    figures["planning_16384_nodes_s"] = round(planning_s(), 2)
    report("elastic_sim", table, Findings(figures=figures, goals=judge(figures), skipped=skipped), runs)


def tell_world(name: str, results: dict[str, list[ScaleResult]], table: Table, figures: dict[str, Figure]) -> None:
    means = {way: mean(one.ettr for one in found) for way, found in results.items()}
    for way, found in results.items():
        lost = {use: mean(one.lost_by_use.get(use, 0.0) for one in found) for use in found[0].lost_by_use}
        told = ", ".join(f"{use} {seconds / 60:.0f} min" for use, seconds in list(lost.items())[:3])
        table.add_row(name, way, f"{means[way]:.2%}", f"{mean(one.tally.incidents for one in found):.0f}", told)
        figures[f"{name}: {way}"] = round(means[way], 5)
    best = max((way for way in means if way in SINGLE), key=means.__getitem__)
    figures[f"{name}: best single"] = best
    figures[f"{name}: regret"] = round(means[best] - means[ELASTIC], 5)
    seeds = zip(*(results[way] for way in means if way in SINGLE), strict=True)
    hindsight = mean(max(one.ettr for one in found) for found in seeds)  # another one for each seed
    figures[f"{name}: regret by seed"] = round(hindsight - means[ELASTIC], 5)


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def planning_s() -> float:
    """Processor time of one choice for 16,384 nodes in 1,024 pipelines, one of which has lost a node."""
    job = PipelineJob(layers=64, microbatches=32768, stages=16, pipelines=1024, floor=Semantics.FP_ORDER)
    mix, sheet = failure_mixes.load_mix("llama3"), price_sheet.load_sheet()
    costs = expected_costs(ScaleState(LARGEST, mix, sheet))
    names = [f"n{number}" for number in range(16384)]
    situation = situation_of(first_plan(job, 16384), names, names[:99] + names[100:], 7, forked=False)
    start = time.process_time()
    choose_plan(job, situation, costs, policies_of(ELASTIC, lost=True))
    return time.process_time() - start


def judge(figures: dict[str, Figure]) -> dict[str, bool]:
    def at(world: str, way: str) -> float:
        found = figures.get(f"{world}: {way}")
        return found if isinstance(found, float) else 0.0

    told = [name for name in WORLDS if f"{name}: {ELASTIC}" in figures]
    return {
        "elastic_above_restarts": all(at(name, ELASTIC) > at(name, NAME) for name in told),
        "elastic_above_survivors": all(at(name, ELASTIC) > at(name, SURVIVORS) for name in told),
        f"regret_within_{REGRET:.1%}": all(at(name, "regret") <= REGRET for name in told),
    }


if __name__ == "__main__":
    main()
