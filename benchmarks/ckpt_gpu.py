"""What snapshots cost on a GPU: longer steps, the processor's time, and the way back after a SIGKILL.

A transformer with 671 million fp32 parameters and fused AdamW: 8 GB of state. Steps with and without a snapshot take
turns in one process, each pair in an order of its own, timed on the GPU; what counts is the median of the differences
within pairs. Then a job of the same size under `holdfast run` is killed at random moments, and its weights compared.
"""

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import nn

from benchmarks._harness import Fault, Job, free_port
from benchmarks._report import FULL, Findings, report
from holdfast.client.checkpointing.checkpointer import Checkpointer

SCRIPT = Path(__file__).with_name("_train_snapshots.py")
LAYERS, WIDTH = 13, 2048
# Tokens, and how often before a step. Copies fit into the first two, and not into the last.
FITS, LONG, SHORT = (24576, 1), (24576, 2), (7680, 1)
EVERY = 4  # steps from a snapshot to the next where copies do not fit
PAIRS = 60 if FULL else 25
KILLS, STEPS, SPARED_STEPS = 4, 30, 150
LIMIT_S = 240.0  # of one part
LONGER_GOAL, BLOCKED_GOAL, STALL_GOAL, SHADOW_GOAL, RESTORE_GOAL, SPARED_GOAL = 0.15, 0.5, 1.0, 60.0, 0.6, 1.5


class Training:
    """fp32 parameters and fused AdamW, computing in bf16."""

    def __init__(self, tokens: int, times: int, *, is_calm: bool) -> None:
        """`is_calm`: of zeros alone, which the GPU multiplies as it does others, but without coming to the limit of its
        power, where clocks go up and down all the time and no two steps are alike."""
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.1, batch_first=True, device="cuda")
        encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH, device="cuda"), encoder)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(tokens // 512, 512, WIDTH, device="cuda")
        self.times = times
        self.bytes = 3 * sum(parameter.nbytes for parameter in self.model.parameters())
        if is_calm:
            self.optimizer.param_groups[0]["lr"] = 0.0
            with torch.no_grad():
                for tensor in (*self.model.parameters(), self.batch):
                    tensor.zero_()

    def step(self) -> torch.Tensor:
        loss = torch.zeros(())
        for _ in range(self.times):
            with torch.autocast("cuda", torch.bfloat16):
                loss = self.model(self.batch).square().mean()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Middle(NamedTuple):
    """A median and its standard error, as good as for normal noise."""

    value: float
    error: float

    @classmethod
    def of(cls, measured: list[float]) -> "Middle":
        value = statistics.median(measured)
        spread = 1.4826 * statistics.median(abs(one - value) for one in measured)
        return cls(value, 1.2533 * spread / len(measured) ** 0.5)


class Turns:
    """Steps with and without a save before them, in turns."""

    def __init__(self, training: Training, every: int, save: Callable[[], object]) -> None:
        self.training, self.every, self._save = training, every, save
        self.blocked_ms: list[float] = []

    def save(self) -> None:
        began = time.perf_counter()
        self._save()
        self.blocked_ms.append(1e3 * (time.perf_counter() - began))

    def measure(self, pairs: int, *, is_read: bool) -> tuple[list[float], list[float]]:
        """Milliseconds of `every` steps without and with a snapshot before them; `is_read`: the loss, at every step."""
        chance = random.Random(0)
        took: dict[bool, list[tuple[Any, Any]]] = {False: [], True: []}
        for _ in range(pairs):
            first = chance.random() < 0.5
            for saves in (first, not first):
                took[saves].append(self._timed(saves, is_read))
        torch.cuda.synchronize()
        plain, saving = ([began.elapsed_time(ended) for began, ended in took[saves]] for saves in (False, True))
        return plain, saving

    def _timed(self, saves: bool, is_read: bool) -> tuple[Any, Any]:
        began = torch.cuda.Event(enable_timing=True)
        began.record()
        if saves:
            self.save()
        for _ in range(self.every):
            loss = self.training.step()
            if is_read:
                loss.item()
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        return began, ended


def settled(turns: Turns) -> float:
    """Snapshots until the ways are chosen; milliseconds of the first save."""
    for _ in range(6):
        turns.save()
        for _ in range(turns.every):
            turns.training.step()
        torch.cuda.synchronize()
    first_ms = turns.blocked_ms[0]
    turns.blocked_ms.clear()
    return first_ms


def cost(size: tuple[int, int], every: int, pairs: int, *, is_calm: bool = True) -> dict[str, Any]:
    training = Training(*size, is_calm=is_calm)
    for _ in range(3):
        training.step()
    began = time.perf_counter()
    ckpt = Checkpointer(model=training.model, optimizer=training.optimizer)
    made_s, numbers = time.perf_counter() - began, itertools.count(1)
    turns = Turns(training, every, lambda: ckpt.save(next(numbers)))
    found: dict[str, Any] = {"state_gb": training.bytes / 1e9, "made_s": made_s, "first_save_ms": settled(turns)}
    for name, is_read, count in (("queued", False, pairs), ("read", True, max(9, pairs // 2))):
        turns.blocked_ms.clear()
        found[name] = describe_stall(*turns.measure(count, is_read=is_read), every) | {
            "blocked_ms": statistics.median(turns.blocked_ms),
            "blocked_most_ms": max(turns.blocked_ms),
        }
        found[name]["stall_ms_per_gb"] = found[name]["stall_ms"] / found["state_gb"]
    side = ckpt._snapshots.side if ckpt._snapshots else None
    assert side
    found["shadow_percent"] = 100 * side.ways.shadow_bytes / training.bytes
    found["skipped"] = ckpt.skipped
    ckpt.close()
    return found


def describe_stall(plain: list[float], saving: list[float], every: int) -> dict[str, float]:
    """Return how much longer these milliseconds of `every` steps are with a save; the first pair is left out."""
    stall = Middle.of([b - a for a, b in zip(plain[1:], saving[1:], strict=True)])
    step_ms = statistics.median(plain) / every
    return {
        "step_ms": step_ms,
        "stall_ms": stall.value,
        "stall_error_ms": stall.error,
        "longer_percent": 100 * stall.value / every / step_ms,
        "longer_error_percent": 100 * stall.error / every / step_ms,
        "pairs": len(plain) - 1,
    }


def killed(*, spare: bool = False) -> dict[str, Any]:
    """A job under `holdfast run`, killed again and again, beside one that nobody disturbs and no agent looks after;
    `spare`: a standing spare rank, which has rehearsed a step, takes the seat."""
    env = {"BENCH_STEPS": str(SPARED_STEPS if spare else STEPS), "BENCH_SPARE": str(int(spare))}
    wanted = undisturbed(env)
    launch = [sys.executable, "-m", "holdfast.cli", "run", "--standalone", "--nproc-per-node=1", "--max-restarts=99"]
    if spare:
        launch.append("--set=recovery.spares=true")
    chance = random.Random(1)
    phases: list[dict[str, float]] = []
    lost: list[int] = []
    with Job(1, script=SCRIPT) as job:
        job.start(launch, env)
        fault: Fault | None = None
        for _ in range(KILLS):
            if job.wait_steps(4, fault, LIMIT_S / 4) is None:
                raise SystemExit(f"the job does not step:\n{job.last_words(40)}")
            if spare and job.wait(lambda: find_rehearsed(job), LIMIT_S / 4) is None:
                raise SystemExit(f"no spare rank has rehearsed:\n{job.last_words(40)}")
            time.sleep(chance.uniform(0.0, 0.5))
            fault = Fault(before=frozenset(find_stepped(job)), at=time.time())
            phases.append(time_recovery(job, fault))
            lost.append(int(phases[-1].pop("lost")))
        job.launchers[0].wait(LIMIT_S / 2)
        found = (job.folder / "checkpoint.pt").read_text()
    middle = {kind: statistics.median(one[kind] for one in phases) for kind in phases[0]}
    return {
        "after_s": middle,
        "laid_s": statistics.median(one["laid"] - one["entered"] for one in phases),
        "answer_s": statistics.median(one["answered"] - one["laid"] for one in phases),
        "copy_s": statistics.median(one["restored"] - one["answered"] for one in phases),
        "restore_s": statistics.median(one["restored"] - one["laid"] for one in phases),
        "restore_most_s": max(one["restored"] - one["laid"] for one in phases),
        "step_most_s": max(one["step"] for one in phases),
        "steps_lost": lost,
        "bit_exact": found == wanted,
        "kills": KILLS,
    }


def time_recovery(job: Job, fault: Fault) -> dict[str, float]:
    """Kill the rank that steps. Return when its heir came to what, from the kill on, and how many steps were lost."""
    newest = max((event for event in job.events() if event.kind == "step"), key=lambda event: event.at)
    victim = newest.pid
    job.kill(victim)
    reaped = job.wait(lambda: None if Path(f"/proc/{victim}").exists() else time.time(), 60.0)
    done = max(event.step for event in job.events() if event.kind == "step")
    if job.wait_steps(1, fault, LIMIT_S / 4) is None:
        raise SystemExit(f"the job did not come back:\n{job.last_words(40)}")
    heir = next(event.pid for event in job.events() if event.kind == "step" and event.pid not in fault.before)
    fresh = {event.kind: event for event in reversed(job.events()) if event.pid == heir}
    phases = {kind: event.at - fault.at for kind, event in fresh.items()}
    phases["reaped"] = (reaped or time.time()) - fault.at
    if (second := job.wait_steps(2, fault, LIMIT_S / 4)) is not None:
        phases["second_step"] = second - fault.at
    phases["lost"] = done - fresh["restored"].step
    return phases


def find_stepped(job: Job) -> set[int]:
    """The processes that have made a step of the job."""
    return {event.pid for event in job.events() if event.kind == "step"}


def find_rehearsed(job: Job) -> int | None:
    """The spare rank that has rehearsed and has no seat yet."""
    stepped = find_stepped(job)
    return next((event.pid for event in job.events() if event.kind == "rehearsed" and event.pid not in stepped), None)


def undisturbed(env: dict[str, str]) -> str:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with Job(1, script=SCRIPT) as job:
        launcher = job.start([sys.executable], env | alone)
        if launcher.wait(LIMIT_S / 2):
            raise SystemExit(f"the job that nobody disturbs has failed:\n{job.last_words(40)}")
        return (job.folder / "checkpoint.pt").read_text()


def bare(pairs: int) -> dict[str, Any]:
    """What the copies alone cost: a single tensor of the same size goes to registered memory on a stream of its own,
    and the optimizer's step waits for it. No saver can do with less as long as it copies all of the state."""
    training = Training(*FITS, is_calm=True)
    for _ in range(3):
        training.step()
    state = torch.zeros(training.bytes, dtype=torch.uint8, device="cuda")
    host = torch.zeros(training.bytes, dtype=torch.uint8)
    torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    side, copied = torch.cuda.Stream(), torch.cuda.Event()
    training.optimizer.register_step_pre_hook(lambda *_: torch.cuda.current_stream().wait_event(copied))

    def save() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host.copy_(state, non_blocking=True)
        copied.record(side)

    turns = Turns(training, 1, save)
    found: dict[str, Any] = {"state_gb": training.bytes / 1e9}
    for name, is_read, count in (("queued", False, pairs), ("read", True, max(9, pairs // 2))):
        plain, saving = turns.measure(count, is_read=is_read)
        found[name] = describe_stall(plain, saving, 1)
    return found


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "fits": lambda: cost(FITS, 1, PAIRS),
    "bare": lambda: bare(PAIRS),
    "long": lambda: cost(LONG, 1, PAIRS),
    "hot": lambda: cost(FITS, 1, PAIRS, is_calm=False),
    "short": lambda: cost(SHORT, EVERY, max(12, PAIRS // 2)),
    "killed": killed,
    "spared": lambda: killed(spare=True),
}


def alone(part: str) -> dict[str, Any] | str:
    """One part in a process of its own: what it found, or how it failed."""
    try:
        done = subprocess.run([sys.executable, __file__, part], stdout=subprocess.PIPE, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not done within {LIMIT_S:g} s"
    if done.returncode:
        return f"exit code {done.returncode}: {done.stdout.decode()[-400:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def judge(parts: dict[str, dict[str, Any]], table: Table, findings: Findings) -> None:
    def row(name: str, value: float, text: str, goal: float) -> None:
        findings.goals[name] = value <= goal
        table.add_row(name.replace("_", " "), text, f"at most {goal:g}")

    for part in ("fits", "long", "hot"):
        for way in ("queued", "read") if part in parts else ():
            one = parts[part][way]
            text = f"{one['longer_percent']:.3f} +- {one['longer_error_percent']:.3f} of {one['step_ms']:.1f} ms"
            row(f"longer_steps_percent_{part}_{way}", one["longer_percent"], text, LONGER_GOAL)
    if "bare" in parts and "fits" in parts:
        for way in ("queued", "read"):
            ours, theirs = parts["fits"][way]["stall_ms"], parts["bare"][way]["stall_ms"]
            table.add_row(f"{way}: of what the copies alone cost", f"{ours:.2f} of {theirs:.2f} ms", "")
            findings.figures[f"of_bare_copies_{way}"] = round(ours / theirs, 2)
    if fits := parts.get("fits"):
        row("blocked_ms", fits["read"]["blocked_ms"], f"{fits['read']['blocked_ms']:.3f}", BLOCKED_GOAL)
    if short := parts.get("short"):
        one = short["queued"]
        text = f"{one['stall_ms_per_gb']:.2f} ({one['stall_ms']:.2f} +- {one['stall_error_ms']:.2f} ms)"
        row("stall_ms_per_gb", one["stall_ms_per_gb"], text, STALL_GOAL)
        row("shadow_percent", short["shadow_percent"], f"{short['shadow_percent']:.0f}", SHADOW_GOAL)
    if after := parts.get("killed"):
        row("restore_s", after["restore_s"], f"{after['restore_s']:.2f}", RESTORE_GOAL)
        row("steps_lost", max(after["steps_lost"]), str(after["steps_lost"]), 1)
        findings.goals["bit_exact"] = after["bit_exact"]
    if spared := parts.get("spared"):
        row("stepping_s_with_a_spare_rank", spared["after_s"]["step"], f"{spared['after_s']['step']:.2f}", SPARED_GOAL)
        findings.goals["bit_exact_with_a_spare_rank"] = spared["bit_exact"]


def main() -> int:
    if sys.argv[1:]:
        print(json.dumps(PARTS[sys.argv[1]]()))
        return 0
    table = Table(title="Snapshots of 8 GB of state on a GPU")
    for column in ("what", "median of pairs", "goal"):
        table.add_column(column)
    findings = Findings()
    if not Path("/proc/driver/nvidia/gpus").exists():
        findings.skipped["ckpt-gpu"] = "no CUDA device on this machine"
        report("ckpt-gpu", table, findings)
        return 0
    asked = os.environ.get("BENCH_PARTS", ",".join(PARTS)).split(",")
    parts: dict[str, dict[str, Any]] = {}
    for part in asked:
        found = alone(part)
        print(part, json.dumps(found), flush=True)
        if isinstance(found, str):
            findings.skipped[part] = found
        else:
            parts[part] = found
            findings.figures |= flat(part, found)
    judge(parts, table, findings)
    report("ckpt-gpu", table, findings)
    return 0


def flat(name: str, found: dict[str, Any]) -> dict[str, float | str | None]:
    figures: dict[str, float | str | None] = {}
    for key, value in found.items():
        if isinstance(value, dict):
            figures |= flat(f"{name}_{key}", value)
        else:
            figures[f"{name}_{key}"] = round(value, 4) if isinstance(value, float) else str(value)
    return figures


if __name__ == "__main__":
    sys.exit(main())
