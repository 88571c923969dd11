"""An elastic pipeline over NCCL: from a strike at a point of a step to all ranks stepping again, and the bits.

Two stages of two replicas. One GPU is enough: ranks share it. Without one the same job runs over gloo.
BENCH_TRIALS=POLICY:POINT:HOW,... chooses trials. In `lost` the rank's node is gone, and three ranks go on. With
BENCH_SPARES=1 each rank has a standing spare rank, which has rehearsed a step before the strike. With BENCH_UNCHECKED=1
nobody looks whether the last exchange of a step was aborted, so its bits are wrong. BENCH_CALM=DIGEST names the bits of
an earlier calm run on the same machine.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import torch
from rich.table import Table

from benchmarks._harness import START_LIMIT_S, Event, Job, holdfast
from benchmarks._report import Findings, brief, median, report
from benchmarks.nccl import paths
from holdfast.fleet.local_process_fleet import node_processes

RANKS, VICTIM, STRUCK = 4, 1, 22
NODES = ["--nnodes=4", "--nproc-per-node=1", "--set=hang.act_s=10", "--set=hang.least_s=1"]
SPARES, UNCHECKED = (os.environ.get(name) == "1" for name in ("BENCH_SPARES", "BENCH_UNCHECKED"))
STEPS, GATE, GOAL_S = 40, 12, 1.0
LIMIT_S = float(os.environ.get("BENCH_LIMIT_S", "60"))
LOST = "lost"
SCRIPT = Path(__file__).with_name("_elastic_pipeline_rank.py")
ALL_POINTS = ("forward", "backward", "sums", "vote", "apply", "keep")
TRIALS = (
    *(f"replace:{point}:killed" for point in ALL_POINTS),
    *(f"replace:{point}:stopped" for point in ("forward", "vote", "keep")),
    "reroute:backward:killed",
    "reroute:vote:stopped",
    "retemplate:sums:killed",
    "stochastic wiring:forward:killed",
    "memory rollback:backward:killed",
    "memory rollback:sums:stopped",
    "reroute::lost",
    "retemplate::lost",
)

Trial = dict[str, object]


def trial(named: str, calm: str) -> Trial:
    """Run one job, in which a rank strikes itself unless none is named; tell what came of it."""
    began_at = time.monotonic()
    policy, point, how = named.split(":") if named else ("", "", "")
    found: Trial = {"policy": policy, "point": point, "how": how}
    with Job(RANKS, SCRIPT) as job:
        flags = [f"--steps={STEPS}", f"--gate={GATE}", f"--policy={policy}", *(["--unchecked"] if UNCHECKED else [])]
        flags += [f"--strike={VICTIM}:{STRUCK}:{point}:{how}"] if point else []
        more = ["--set=recovery.spares=true"] if SPARES and named else []
        more += ["--min-nodes=3"] if how == LOST else []
        launcher = job.start(holdfast(job.folder / "run", *NODES, *more), paths(), flags)
        before = job.wait(lambda: job.steps_in(1, GATE - 1), START_LIMIT_S)
        if before is None or (SPARES and named and not job.wait(lambda: list_rehearsed(job), START_LIMIT_S)):
            return found | {"failed": last_words(job)}
        (job.folder / "events" / "go").touch()
        if how == LOST:
            job.wait(lambda: job.steps_in(1, STRUCK), LIMIT_S)
            lose_node(job, job.pid_of(VICTIM))
            job.ranks = RANKS - 1
        if named:
            after = job.wait(lambda: job.steps_in(2, 1), LIMIT_S)
            if after is None:
                return found | {"failed": last_words(job)}
            found |= describe_return(job, before, after)
        job.wait(lambda: launcher.poll(), LIMIT_S)
        told = {path.read_text() for path in (job.folder / "events").glob("weights-*")}
        found["weights"] = told.pop() if len(told) == 1 else f"{len(told)} kinds"
        found["equal"] = found["weights"] == calm
        recoveries = [json.loads(path.read_text()) for path in (job.folder / "events").glob("recoveries-*")]
        found["recoveries"] = max(recoveries, key=len, default=[])
        found["broke"] = {path.name: path.read_text() for path in (job.folder / "events").glob("broke-*")}
        found["said"] = [line for line in job.last_words(400).splitlines() if line.startswith("holdfast: ")]
        found["step_s"] = median_step(job.events())
    return found | {"trial_s": round(time.monotonic() - began_at, 1)}


def lose_node(job: Job, rank_pid: int) -> None:
    """Kill all of the node on which this process is, and note when."""
    nodes = [node_processes(folder) for folder in (job.folder / "run" / "nodes").iterdir()]
    pids = next(pids for pids in nodes if rank_pid in pids)
    struck = job.folder / "events" / "struck"
    struck.write_text(str(time.time()))
    for pid in sorted(pids):  # its holder first
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def last_words(job: Job) -> str:
    """What the launcher and the ranks said last, and where the processes are now, if py-spy is there."""
    logs = sorted((job.folder / "run").rglob("stderr.log"))
    told = [f"{path.parent}:\n{chr(10).join(path.read_text(errors='replace').splitlines()[-15:])}" for path in logs]
    if spy := shutil.which("py-spy"):
        for pid in {event.pid for event in job.events()} & set(job.pids()):
            seen = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, check=False)
            told.append(seen.stdout)
    return "\n".join([job.last_words(60), *told])


def describe_return(job: Job, before: list[Event], after: list[Event]) -> Trial:
    struck_at = float((job.folder / "events" / "struck").read_text())
    rehearsed = set(list_rehearsed(job) or ()) & {event.pid for event in after}
    return {
        "stepping_s": round(max(event.at for event in after) - struck_at, 2),
        "kept": len({event.pid for event in before} & {event.pid for event in after}),
        **({"rehearsed": len(rehearsed)} if SPARES else {}),
    }


def list_rehearsed(job: Job) -> list[int] | None:
    """The processes of spare ranks that have rehearsed a step; None until each rank has one."""
    found = [path.name.split("-")[1:] for path in (job.folder / "events").glob("rehearsed-*")]
    return [int(pid) for _, pid in found] if len({rank for rank, _ in found}) == RANKS else None


def median_step(events: list[Event]) -> float:
    """The median time between two steps of a rank in its first generation."""
    times = [event.at for event in events if event.rank == 0 and event.kind == "step in 1"]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return round(statistics.median(gaps), 4) if gaps else 0.0


def main() -> None:
    chosen = [one for one in os.environ.get("BENCH_TRIALS", ",".join(TRIALS)).split(",") if one]
    table = Table("policy", "point", "how", "stepping s", "processes kept", "bits of a calm run", title=_title())
    known = os.environ.get("BENCH_CALM", "")
    calm: Trial = {"weights": known} if known else trial("", "")
    print(calm, flush=True)
    found: list[Trial] = []
    for named in chosen:
        found.append(one := trial(named, str(calm.get("weights"))))
        print({key: value for key, value in one.items() if key not in ("said", "failed")}, flush=True)
        print("\n".join(map(str, one.get("said", [one.get("failed")]))), flush=True)  # type: ignore[call-overload]
        cells = (one["policy"], one["point"], one["how"], brief(_seconds(one)), one.get("kept"), one.get("equal"))
        table.add_row(*map(str, cells))
    times = {f"{one['policy']} {one['point']} {one['how']}": [_seconds(one)] for one in found}
    report("elastic_pipeline_nccl", table, judge(found, calm), times)


def _title() -> str:
    return f"{(__doc__ or '').partition(chr(10))[0]} {'NCCL' if torch.cuda.is_available() else 'gloo'}"


def _seconds(one: Trial) -> float | None:
    seconds = one.get("stepping_s")
    return seconds if isinstance(seconds, float) else None


def judge(found: list[Trial], calm: Trial) -> Findings:
    findings = Findings(
        figures={"calm step_s": calm.get("step_s")},  # type: ignore[dict-item]
        goals={
            "bits_of_a_calm_run": all(one.get("equal") for one in found),
            "processes_go_on": all(one.get("kept") == RANKS - 1 for one in found),
            "policy_was_followed": all(_policies(one) == [one["policy"]] for one in found),
        },
    )
    if SPARES:
        findings.goals["spares_take_the_seats"] = all(one.get("rehearsed") == 1 for one in found)
    for how in dict.fromkeys(str(one["how"]) for one in found):
        times = [_seconds(one) for one in found if one["how"] == how]
        findings.figures[f"{how} stepping_s"] = median(times)
        findings.figures[f"{how} trials"] = len(times)
        if how == "killed":
            findings.goals[f"under_{GOAL_S}_s"] = all(one is not None and one <= GOAL_S for one in times)
    return findings


def _policies(one: Trial) -> list[object]:
    recoveries = one.get("recoveries")
    return [recovery["policy"] for recovery in recoveries] if isinstance(recoveries, list) else []


if __name__ == "__main__":
    main()
