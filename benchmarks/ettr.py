"""ETTR of a job that is struck once a minute: ranks crash or stand still, nodes are lost, a release is bad."""

import json
import os
import signal
import time
from typing import Any

import msgspec
from rich.table import Table

from benchmarks._ettr_plan import Strike, plan
from benchmarks._ettr_windows import window_figures
from benchmarks._exact_scene import RANKS, Failed, Scene
from benchmarks._harness import Job
from benchmarks._kept import Kept
from benchmarks._report import FULL, Findings, report
from holdfast.core.record.job_account import Span

DURATION_S = float(os.environ.get("BENCH_DURATION_S", "1200" if FULL else "360"))
EVERY_S = float(os.environ.get("BENCH_EVERY_S", "60"))
SEED = int(os.environ.get("BENCH_SEED", "3"))
STANDBYS = 2
PERIOD_S = 0.1  # of a step, as long as the machine keeps up
CALIBRATED_STEPS = 100
GOAL = 0.90


class Calm(msgspec.Struct, frozen=True):
    digest: str


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    strike: Strike
    at: float
    lost_s: float | None  # None: no incident came of it
    story: str


class Stormy(msgspec.Struct, frozen=True, kw_only=True):
    steps: int
    ettr: float
    wall_s: float
    spent_s: dict[str, float]
    digest: str
    incidents: int
    struck: list[Struck]
    load: float
    spans: list[Span] = []
    rungs: dict[str, int] = {}


def steps_for(duration_s: float) -> int:
    """How many steps this machine makes in that time: the job ends at a step, not at a time."""
    with Job(RANKS) as job:
        scene = Scene(job)
        scene.start([], steps=CALIBRATED_STEPS, period_s=PERIOD_S)
        scene.await_steps(CALIBRATED_STEPS)
        steps = sorted({event.step: event.at for event in job.events() if event.kind == "step"}.items())
        first, last = steps[len(steps) // 2], steps[-1]
    return round(duration_s / ((last[1] - first[1]) / (last[0] - first[0])))


def calm(steps: int) -> Calm:
    """The same steps, undisturbed and without pauses."""
    with Job(RANKS) as job:
        scene = Scene(job)
        scene.start([], steps=steps, period_s=0.0)
        ended(scene, DURATION_S)
        return Calm(scene.out.read_text())


def stormy(steps: int) -> Stormy:
    with Job(RANKS) as job:
        scene = Scene(job)
        scene.start([f"--standbys={STANDBYS}"], steps=steps, period_s=PERIOD_S)
        scene.await_steps(1)
        load, began = os.getloadavg()[0], time.monotonic()
        struck: list[tuple[Strike, float]] = []
        for strike in plan(SEED, DURATION_S, EVERY_S, RANKS):
            if not reached(job, began + strike.at_s):
                break  # the job has ended
            struck.append((strike, struck_now(scene, strike)))
        ended(scene, DURATION_S)
        told: dict[str, Any] = json.loads(scene.command("report", str(scene.run_dir), "--json"))
        return Stormy(
            steps=steps,
            ettr=told["ettr"],
            wall_s=told["wall_s"],
            spent_s=told["spent_s"],
            digest=scene.out.read_text(),
            incidents=len(told["incidents"]),
            struck=[became(scene, strike, at) for strike, at in struck],
            load=max(load, os.getloadavg()[0]),
            spans=msgspec.convert(told["spans"], list[Span]),
            rungs=told["rungs"],
        )


def reached(job: Job, due: float) -> bool:
    """Wait for this moment; False when the job has ended by then."""
    return job.wait(lambda: time.monotonic() >= due or None, DURATION_S) is not None


def struck_now(scene: Scene, strike: Strike) -> float:
    scene.awaited(strike.rank)  # where the job is not back from the last one, this one has to wait
    at = time.time()
    match strike.kind:
        case "rank crash":
            scene.signal(strike.rank, signal.SIGKILL)
        case "rank stopped":
            scene.signal(strike.rank, signal.SIGSTOP)
        case "node loss":
            scene.lose_node(strike.rank)
        case "bad release":
            scene.command("update", str(scene.tree(2, broken=True)), "--now", "--no-wait", "--run", str(scene.run_dir))
    print(f"  {strike.at_s:.0f} s: {strike.kind}, rank {strike.rank}", flush=True)
    return at


def became(scene: Scene, strike: Strike, at: float) -> Struck:
    """The incident that was open, or opened next, when it struck."""
    record = next((one for one in scene.records() if one.resumed_at > at), None)
    lost_s = round(record.resumed_at - record.good_at, 2) if record else None
    return Struck(strike=strike, at=at, lost_s=lost_s, story=record.sentence if record else "")


def ended(scene: Scene, limit_s: float) -> None:
    code = scene.job.wait(lambda: scene.job.launchers[-1].poll(), 2 * limit_s + 300.0)
    if code != 0:
        raise Failed(f"the job {'did not end' if code is None else f'ended with {code}'}:\n{scene.job.last_words(30)}")


def judge(reference: Calm, storm: Stormy) -> Findings:
    return Findings(
        figures={
            "ettr": round(storm.ettr, 4),
            "wall_s": round(storm.wall_s, 1),
            "steps": storm.steps,
            "faults": len(storm.struck),
            "incidents": storm.incidents,
            "load": round(storm.load, 1),
            **{f"{use}_s": round(seconds, 2) for use, seconds in storm.spent_s.items()},
            **{f"of_any_{name}": value for name, value in window_figures(storm.spans).items()},
        },
        goals={"ettr_at_least_0.90": storm.ettr >= GOAL, "weights_exact": reference.digest == storm.digest},
    )


def main() -> None:
    kept = Kept("ettr")
    storm = kept.part("stormy", Stormy, lambda: stormy(steps_for(DURATION_S)))
    reference = kept.part("calm", Calm, lambda: calm(storm.steps))
    table = Table("after", "fault", "rank", "lost, s", "what became of it", title=(__doc__ or "").strip())
    for one in storm.struck:
        lost = "" if one.lost_s is None else f"{one.lost_s:.1f}"
        table.add_row(f"{one.strike.at_s:.0f} s", one.strike.kind, str(one.strike.rank), lost, one.story)
    findings = judge(reference, storm)
    report("ettr", table, findings, {"lost_s": [one.lost_s for one in storm.struck]})
    kept.forget()


if __name__ == "__main__":
    main()
