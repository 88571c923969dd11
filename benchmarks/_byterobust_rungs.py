"""Table 4: incidents by what ended them, counted in the simulator by the function that counts a report's."""

from benchmarks._byterobust_part import Part
from benchmarks._report import FULL
from holdfast.core.record.solving_rungs import Rung
from holdfast.sim.scale import failure_mixes, policy_study
from holdfast.sim.scale.failure_schedule import ScaleSetup
from holdfast.sim.scale.holdfast_policy import NAME

SEEDS = range(1, 6) if FULL else range(1, 3)
NODES = 1200
# job -> days, incidents of machines and code, and percent by what ended them as published
JOBS = {
    "dense": (90.0, 175, {"eviction and restart": 73.1, "hot update": 11.4, "analyzer eviction": 8.6, "rollback": 6.9}),
    "MoE": (30.0, 125, {"eviction and restart": 56.8, "hot update": 24.8, "analyzer eviction": 7.2, "rollback": 11.2}),
}
# Of ByteRobust's classes: ours that are the same. Its first one has restarts in place in it.
CLASSES: dict[str, tuple[Rung, ...]] = {
    "eviction and restart": (Rung.EVICTION, Rung.GUESS, Rung.EXAMINED, Rung.RESTART, Rung.SKIP),
    "hot update": (Rung.UPDATE,),
    "analyzer eviction": (Rung.HANG,),
    "rollback": (Rung.ROLLBACK,),
    "a person": (Rung.ORDER, Rung.PERSON),
}


def rungs() -> Part:
    part, mix = Part(), failure_mixes.load_mix("byterobust")
    for job, (days, incidents, published) in JOBS.items():
        by_code = published["hot update"] / 100 * incidents  # which come by their own rate
        setup = ScaleSetup(gpus=8 * NODES, days=days, rate=(incidents - by_code) / (NODES * days))
        found = policy_study.play_seeds(NAME, setup, mix, SEEDS)
        total = sum(found.rungs.values())
        for name, same in CLASSES.items():
            counts = {rung: found.rungs.get(rung.value, 0.0) for rung in same}
            share = 100 * sum(counts.values()) / total
            detail = ", ".join(f"{rung.value} {count:.1f}" for rung, count in counts.items())
            paper = f"{published[name]} %" if name in published else "not told"
            part.rows.append((f"table 4, {job}: {name}", f"{share:.1f} % ({detail})", paper, "simulated"))
            part.figures[f"{job}_{name.replace(' ', '_')}_percent"] = round(share, 1)
        part.figures |= {f"{job}_ended": round(total, 1), f"{job}_faults": round(found.incidents, 1)}
        part.figures[f"{job}_ettr"] = round(found.ettr, 4)
    return part.stamped()
