"""Ranks over NCCL that survive: from a failure to all four stepping again, and whether the bits are a calm run's.

One GPU is enough: ranks share it. Without one the same job runs over gloo. BENCH_KINDS and BENCH_STRIKES choose.
With BENCH_SPARES=1 each rank has a standing spare rank, which has rehearsed a step before the strike.
"""

import os
from pathlib import Path

import torch
from rich.table import Table

from benchmarks._harness import START_LIMIT_S, Job, holdfast
from benchmarks._report import Findings, brief, median, report
from benchmarks.nccl import paths

RANKS, VICTIM, GATE = 4, 2, 60
NODES = ["--nnodes=4", "--nproc-per-node=1", "--set=hang.act_s=10"]
GPU = ("GPU assert", "GPU stands") if torch.cuda.is_available() else ()
KINDS = os.environ.get("BENCH_KINDS", "ddp,fsdp2").split(",")
STRIKES = os.environ.get("BENCH_STRIKES", ",".join(("killed", "queued", "exception", "stopped", *GPU))).split(",")
SPARES = os.environ.get("BENCH_SPARES") == "1"
STEPS, GOAL_S, LIMIT_S = 200, 1.0, 90.0
SCRIPT = Path(__file__).with_name("_elastic_nccl_rank.py")

Trial = dict[str, object]


def trial(kind: str, strike: str, calm: str) -> Trial:
    """Run one job, strike one rank of it unless it is to be calm, and tell what came of it."""
    with Job(RANKS, SCRIPT) as job:
        flags = [f"--kind={kind}", f"--steps={STEPS}", f"--gate={GATE}", *(["--ahead"] if strike == "queued" else [])]
        spares = ["--set=recovery.spares=true"] if SPARES and strike else []
        launcher = job.start(holdfast(job.folder / "run", *NODES, *spares), paths(), flags)
        before = job.wait(lambda: job.steps_in(1, GATE - 1), START_LIMIT_S)
        if before is None or (spares and not job.wait(lambda: list_rehearsed(job), START_LIMIT_S)):
            return {"kind": kind, "strike": strike, "failed": job.last_words(30)}
        struck_at, after = None, None
        if strike:
            asked = job.folder / "events" / f"strike-{VICTIM}"
            asked.with_suffix(".part").write_text("killed" if strike == "queued" else strike)
            asked.with_suffix(".part").rename(asked)
        (job.folder / "events" / "go").touch()
        if strike:
            after = job.wait(lambda: job.steps_in(2, 1), LIMIT_S)
            if after is None:
                return {"kind": kind, "strike": strike, "failed": job.last_words(30)}
            struck_at = float((job.folder / "events" / "struck").read_text())
        job.wait(lambda: launcher.poll(), LIMIT_S)
        told = {path.read_text() for path in (job.folder / "events").glob("weights-*")}
        weights = told.pop() if len(told) == 1 else f"{len(told)} kinds"
        found: Trial = {"kind": kind, "strike": strike, "weights": weights}
        if struck_at is not None and after is not None:
            found["stepping_s"] = round(max(event.at for event in after) - struck_at, 2)
            found["kept"] = len({event.pid for event in before} & {event.pid for event in after})
            found["equal"] = found["weights"] == calm
            if spares:
                found["rehearsed"] = len({event.pid for event in after} & set(list_rehearsed(job) or ()))
            found["said"] = [line for line in job.last_words(400).splitlines() if line.startswith("holdfast: ")]
    return found


def list_rehearsed(job: Job) -> list[int] | None:
    """The processes of spare ranks that have rehearsed a step; None until each rank has one."""
    found = [path.name.split("-")[1:] for path in (job.folder / "events").glob("rehearsed-*")]
    return [int(pid) for _, pid in found] if len({rank for rank, _ in found}) == RANKS else None


def main() -> None:
    table = Table("kind", "strike", "stepping s", "processes kept", "bits of a calm run", title=(__doc__ or "").strip())
    found: list[Trial] = []
    for kind in KINDS:
        calm = trial(kind, "", "")
        print(calm, flush=True)
        for strike in STRIKES:
            found.append(trial(kind, strike, str(calm.get("weights"))))
            one = found[-1]
            print({key: value for key, value in one.items() if key not in ("said", "failed")}, flush=True)
            print("\n".join(map(str, one.get("said", [one.get("failed")]))), flush=True)  # type: ignore[call-overload]
            table.add_row(kind, strike, brief(_seconds(one)), str(one.get("kept")), str(one.get("equal")))
    times = {f"{one['kind']} {one['strike']}": [_seconds(one)] for one in found}
    report("elastic_nccl", table, judge(found), times)


def _seconds(one: Trial) -> float | None:
    seconds = one.get("stepping_s")
    return seconds if isinstance(seconds, float) else None


def judge(found: list[Trial]) -> Findings:
    crashes = [one for one in found if one["strike"] in ("killed", "queued", "exception")]
    times = [seconds for one in crashes if (seconds := _seconds(one)) is not None]
    findings = Findings(
        goals={
            "bits_of_a_calm_run": all(one.get("equal") for one in found),
            "processes_go_on": all(one.get("kept") == RANKS - 1 for one in found),
        }
    )
    if SPARES:
        findings.goals["spares_take_the_seats"] = all(one.get("rehearsed") == 1 for one in found)
    if crashes:
        findings.figures["stepping_s"] = median([_seconds(one) for one in crashes])
        findings.goals[f"under_{GOAL_S}_s"] = len(times) == len(crashes) and max(times) <= GOAL_S
    else:
        findings.skipped["crashes"] = "BENCH_STRIKES names none"
    return findings


if __name__ == "__main__":
    main()
