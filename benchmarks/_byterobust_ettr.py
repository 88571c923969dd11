"""ETTR of a live job that is struck once a minute, over sliding windows, and of simulated months by the hour."""

import statistics

from benchmarks._byterobust_part import Part
from benchmarks._ettr_windows import WINDOWS_S, window_figures
from benchmarks._report import FULL
from benchmarks.ettr import DURATION_S, EVERY_S, Stormy, steps_for, stormy
from holdfast.sim.scale import failure_mixes, policy_study
from holdfast.sim.scale.failure_schedule import ScaleSetup
from holdfast.sim.scale.holdfast_policy import NAME

SEEDS = range(1, 4) if FULL else range(1, 2)
DENSE = ScaleSetup(gpus=9600, rate=155 / (1200 * 90))  # and 20 hot updates: its dense job's 175 incidents


def ettr() -> Part:
    part = Part()
    storm: Stormy = stormy(steps_for(DURATION_S))
    lived = f"{storm.wall_s / 60:.0f} min live, a fault every {EVERY_S:g} s"
    published = "cumulative up to 97 %; of any hour at most 50 min unproductive"
    part.rows.append((f"ETTR, {lived}", f"{100 * storm.ettr:.1f} %", published, "4 gloo ranks"))
    part.figures |= {"live": round(storm.ettr, 4), "live_wall_s": round(storm.wall_s, 1)}
    found = window_figures(storm.spans)
    for window_s in WINDOWS_S:
        least, middle = (found.get(f"{window_s:g}_s_{which}") for which in ("least", "median"))
        if isinstance(least, float) and isinstance(middle, float):
            ours = f"least {100 * least:.0f} %, median {100 * middle:.1f} %"
            part.rows.append((f"ETTR of any {window_s:g} s of it", ours, "", ""))
    part.figures |= {f"live_{name}": value for name, value in found.items()}
    part.figures |= {f"live {rung}": count for rung, count in storm.rungs.items()}
    ended = ", ".join(f"{rung} {count}" for rung, count in storm.rungs.items())
    part.rows.append(("the same job: incidents by what ended them", ended, "table 4", ""))
    _simulated(part)
    return part.stamped()


def _simulated(part: Part) -> None:
    mix, hours, totals = failure_mixes.load_mix("byterobust"), list[float](), list[float]()
    for seed in SEEDS:
        setup = ScaleSetup(gpus=DENSE.gpus, rate=DENSE.rate, seed=seed)
        result, book = policy_study.play_policy(NAME, setup, mix)
        hours += book.ettr_curves(result.saving, 600.0)[2]
        totals.append(result.ettr)
    least, middle = min(hours), statistics.median(hours)
    worst_min = 60 * (1 - least)
    hour = f"worst hour {worst_min:.0f} min unproductive, median {60 * (1 - middle):.1f}"
    ours = f"{100 * statistics.mean(totals):.2f} %; {hour}"
    part.rows.append(("ETTR, 9,600 GPUs, 90 days", ours, "97 %; at most 50 min", "simulated"))
    part.figures |= {"simulated": round(statistics.mean(totals), 4), "worst_hour_unproductive_min": round(worst_min, 1)}
    part.figures["median_hour_unproductive_min"] = round(60 * (1 - middle), 2)
