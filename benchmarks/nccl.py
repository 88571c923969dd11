"""Faults of a job over NCCL: who is named, how soon, and when it steps again. Four ranks, each on a node of its own.

One GPU is enough: ranks share it. `make gpu-lab` runs this on a machine with a GPU that has nothing but its own Python
and torch. BENCH_PARTS=faults,gpus,captured,pipeline,slow,mps,calm,exact,torchrun chooses parts; BENCH_ROUNDS is how
often each is done. In `captured` the whole step is in a graph, in `pipeline` each rank has two stages of torch's
interleaved schedule; in `slow` ranks take turns on the GPU, in `mps` they use it at the same time, where MPS starts.
BENCH_KINDS=ddp,fsdp2,pipeline chooses the jobs of `exact`.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks._detect_scene import RANKS, Failed, Named, Scene, at_random
from benchmarks._detect_slow import Window, windows
from benchmarks._harness import Job
from benchmarks._mps import shared_gpu
from benchmarks._nccl_exact_scene import KINDS, by_torchrun, exactness
from benchmarks._report import FULL, Findings, median, report
from holdfast.model.detector_alarm import Kind, Stance

SCRIPT = Path(__file__).with_name("_nccl_rank.py")
CAPTURED = Path(__file__).with_name("_nccl_captured_rank.py")
PIPELINE = Path(__file__).with_name("_nccl_pipeline_rank.py")
PARTS = os.environ.get("BENCH_PARTS", "faults,gpus,captured,pipeline,slow,mps,calm,exact,torchrun").split(",")
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "4" if FULL else "1"))
CALM_S = float(os.environ.get("BENCH_CALM_S", "600" if FULL else "60"))
SEED = int(os.environ.get("BENCH_SEED", "1"))
FLAGS = ("--nnodes=4", "--nproc-per-node=1", "--standbys=2")
FAILED = (Kind.CRASH, Kind.HANG, Kind.LOSS, Kind.HEALTH)
LIMIT_S = 90.0
SLOW_TIMES, SLOW_EACH = 1.3, 2  # a slow GPU's share of time; windows of each kind in a round
NAMED_GOAL_S, STEPPING_GOAL_S, RIGHT_GOAL = 10.0, 20.0, 0.95

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
ORDERS = {"exception": "fail", "device-side assert": "gpu_assert", "NaN": "nan", "asleep": "sleep", "other": "other"}
GPUS = {"forward": "gpu_forward", "backward": "gpu_backward", "copy stream": "gpu_copy", "graph": "gpu_graph"}
PAUSES = {"evaluation": "evaluate", "save": "save", "reading": "prepare"}
TWO = "two GPUs"
STANDS = ("stopped", "asleep", "forward")  # a process, a script, a GPU: of jobs in which torch's recorder hears less


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    ranks: tuple[int, ...]
    named: Named | None
    named_s: float | None
    stepping_s: float | None

    @property
    def right(self) -> bool:
        """Of a NaN in a loss that all ranks share, nobody can say whose it was."""
        return self.named is not None and (self.named.ranks == self.ranks or self.kind == "NaN")


def struck(scene: Scene, chance: random.Random, kind: str) -> Trial:
    """Strike, and see who is named and when all ranks step again."""
    ranks = tuple(sorted(chance.sample(range(RANKS), 2 if kind == TWO else 1)))
    scene.steady()
    scene.until(scene.has_standby, "a standby", LIMIT_S)
    at_random(chance, 1.0)
    generation, named = scene.generation(), None
    scene.alarms(FAILED)
    if kind in SIGNALS:
        at = scene.signal(ranks[0], SIGNALS[kind])
        named, back_at = watched(scene, generation)
    else:
        form = ORDERS.get(kind) or GPUS.get(kind) or GPUS["forward"]
        step = scene.step() + 8 if len(ranks) > 1 else 0
        with scene.order(form, *ranks, at=step, error="RuntimeError: boom") as id:
            at = max(scene.began(id, rank) for rank in ranks)
            named, back_at = watched(scene, generation)
    if back_at is None:
        for rank in ranks:
            scene.signal(rank, signal.SIGKILL)
        scene.steady(LIMIT_S, after=generation)
    return Trial(
        kind=kind,
        ranks=ranks,
        named=named,
        named_s=round(named.at - at, 2) if named else None,
        stepping_s=round(back_at - at, 2) if back_at else None,
    )


def watched(scene: Scene, generation: int) -> tuple[Named | None, float | None]:
    """The first alarm that names somebody, and when the next generation stepped."""
    named: Named | None = None
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        for alarm in scene.alarms(FAILED):
            named = named or (alarm if alarm.ranks else None)
        if min(page.generation for page in scene.pages()) > generation:
            return named, max(page.first_at for page in scene.pages())
        time.sleep(0.05)
    return named, None


def paths() -> dict[str, str]:
    """The script imports its like, wherever it is started."""
    return {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}


def trials(kinds: Sequence[str], seed: int, script: Path = SCRIPT, *flags: str) -> list[Trial]:
    chance = random.Random(seed)
    found = []
    with Job(RANKS) as job:
        scene = Scene(job, script)
        scene.start(*FLAGS, *flags, env=paths())
        for kind in kinds:
            try:
                found.append(struck(scene, chance, kind))
            except Failed as e:
                print(f"  {kind}: {e}", flush=True)
                found.append(Trial(kind=kind, ranks=(), named=None, named_s=None, stepping_s=None))
                break
            said(found[-1])
    return found


def said(trial: Trial) -> None:
    named = f"named {trial.named.ranks} after {trial.named_s} s" if trial.named else "nobody named"
    wrong = "" if trial.right else f"  WRONG: {trial.named.reason if trial.named else ''}"
    print(f"  {trial.kind} {trial.ranks}: {named}, stepping after {trial.stepping_s} s{wrong}", flush=True)


def calm(seed: int) -> list[Named]:
    """Alarms about a job in which nothing is wrong, but that makes pauses; and all of them are false."""
    chance, found = random.Random(seed), list[Named]()
    with Job(RANKS) as job:
        scene = Scene(job, SCRIPT)
        scene.start(*FLAGS, env=paths())
        until = time.monotonic() + CALM_S
        scene.alarms()
        while time.monotonic() < until:
            kind = chance.choice(list(PAUSES))
            with scene.order(PAUSES[kind], seconds=chance.uniform(2.0, 15.0)) as id:
                began = scene.began(id, 0)
                scene.until(lambda id=id: scene.noted("ended", id, 0), kind)  # type: ignore[misc]
            at_random(chance, 8.0)
            for alarm in scene.alarms():
                print(f"  {kind} since {time.time() - began:.0f} s: {alarm.stance} {alarm.reason}", flush=True)
                found.append(alarm)
    return found


def slowed(seed: int, env: Mapping[str, str]) -> list[Window]:
    """A rank whose GPU takes longer while its process runs ahead of it as the others do; and windows without one."""
    flags = (*FLAGS, "--set=slow.shared_gpus=true", "--set=slow.stance=observe")
    return windows([SLOW_TIMES, 1.0] * SLOW_EACH, seed, SCRIPT, flags, {**paths(), "BENCH_ON_GPU": "1", **env})


def judge_slow_at_once(table: Table, findings: Findings) -> None:
    with shared_gpu(RANKS) as mps:
        if mps.refusal:
            findings.skipped["slow under MPS"] = f"{mps.refusal}; tests/client/test_nccl_dumps.py has recorded dumps"
        else:
            found = [one for n in range(ROUNDS) for one in slowed(SEED + n, mps.env)]
            judge_slow(found, table, findings, "under MPS, ")


def judge_slow(found: list[Window], table: Table, findings: Findings, of: str = "") -> None:
    for name, times in (("slow", SLOW_TIMES), ("clean", 1.0)):
        mine = [one for one in found if one.times == times]
        right, named = sum(one.right for one in mine), median([one.named_s for one in mine])
        table.add_row(f"{of}GPU slow", f"{times:g} times", f"{right} of {len(mine)}", f"{named} s" if named else "", "")
        findings.figures |= {f"{of}{name} right": right, f"{of}{name} windows": len(mine), f"{of}{name} named_s": named}
        findings.goals[f"{of}{name}_right"] = right >= RIGHT_GOAL * len(mine)


def judge(name: str, found: list[Trial], table: Table, findings: Findings, of: str = "") -> None:
    for kind in dict.fromkeys(trial.kind for trial in found):
        mine = [trial for trial in found if trial.kind == kind]
        named, back = median([t.named_s for t in mine]), median([t.stepping_s for t in mine])
        right = sum(trial.right for trial in mine)
        table.add_row(name, kind, f"{right} of {len(mine)}", f"{named} s", f"{back} s")
        whose = f"{of}{kind}"
        findings.figures |= {f"{whose} named_s": named, f"{whose} stepping_s": back, f"{whose} right": right}
        findings.figures[f"{whose} trials"] = len(mine)


def main() -> int:
    table = Table(
        "part", "fault", "right rank", "named after", "stepping after", title=(__doc__ or "").partition("\n")[0]
    )
    findings = Findings()
    if not Path("/proc/driver/nvidia/gpus").exists():
        findings.skipped["nccl"] = "no CUDA device on this machine"
        report("nccl", table, findings)
        return 0
    if "faults" in PARTS:
        found = [one for n in range(ROUNDS) for one in trials([*SIGNALS, *ORDERS], SEED + n)]
        judge("faults", found, table, findings)
        findings.goals["every_fault_right"] = all(trial.right and trial.stepping_s for trial in found)
    if "gpus" in PARTS:
        found = [one for n in range(ROUNDS) for one in trials([*GPUS, TWO], SEED + n)]
        judge("GPU stands", found, table, findings)
        findings.goals["gpus_right"] = sum(trial.right for trial in found) >= RIGHT_GOAL * len(found)
        findings.goals["gpus_named_in_time"] = all(t.named_s is not None and t.named_s < NAMED_GOAL_S for t in found)
        back = median([trial.stepping_s for trial in found])
        findings.goals["gpus_stepping_in_time"] = back is not None and back < STEPPING_GOAL_S
    for name, script, flags in (("captured", CAPTURED, ()), ("pipeline", PIPELINE, ("--mesh=pp=4",))):
        if name in PARTS:
            found = [one for n in range(ROUNDS) for one in trials(STANDS, SEED + n, script, *flags)]
            judge(name, found, table, findings, f"{name}, ")
            findings.goals[f"{name}_right"] = all(trial.right and trial.stepping_s for trial in found)
    if "slow" in PARTS:
        judge_slow([one for n in range(ROUNDS) for one in slowed(SEED + n, {})], table, findings)
    if "mps" in PARTS:
        judge_slow_at_once(table, findings)
    if "calm" in PARTS:
        false = calm(SEED)
        acted = [alarm for alarm in false if alarm.stance == Stance.ACT.value]
        table.add_row("calm", f"{CALM_S:g} s with pauses", f"{len(false)} false, {len(acted)} acted on", "", "")
        findings.figures |= {"calm_s": CALM_S, "calm false alarms": len(false), "calm false actions": len(acted)}
        findings.goals["no_false_action"] = not acted
    if "exact" in PARTS:
        whole = [exactness(kind, on_gpu=True, env=paths(), seed=SEED) for kind in KINDS]
        for one in whole:
            equal = "weights equal" if one.equal else "WEIGHTS DIFFER"
            table.add_row("exact", f"{one.kind}, struck {len(one.strikes)} times", equal, "", f"{one.median_s} s")
            findings.figures[f"{one.kind} struck stepping_s"] = one.median_s
        findings.goals["bit_exact"] = all(one.equal for one in whole)
    if "torchrun" in PARTS:
        theirs = by_torchrun(("killed", "exception", "stopped"), on_gpu=True, env=paths(), limit_s=LIMIT_S)
        for name, took_s in theirs.items():
            table.add_row("torchrun", name, "", "", f"{took_s} s" if took_s else f"not within {LIMIT_S:g} s")
            findings.figures[f"torchrun {name} stepping_s"] = took_s
    report("nccl", table, findings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
