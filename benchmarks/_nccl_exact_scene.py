"""Jobs over NCCL that are struck five times each, and end with the bits of one that nobody disturbs."""

import os
import random
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks._exact_scene import Failed
from benchmarks._harness import Job, holdfast
from benchmarks._recover_launchers import FRESH_STORE

SCRIPT = Path(__file__).with_name("_nccl_exact_rank.py")
RANKS = 4
STEPS, APART = 150, 20  # steps in all, and after how many the next strike comes
LIMIT_S = 90.0
KINDS = tuple(os.environ.get("BENCH_KINDS", "ddp,fsdp2,pipeline").split(","))


class Exactness(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    strikes: tuple[str, ...]
    stepping_s: tuple[float, ...]
    equal: bool

    @property
    def median_s(self) -> float:
        return statistics.median(self.stepping_s)


def strikes(on_gpu: bool) -> dict[str, Callable[[Job, int], None]]:
    def signalled(number: signal.Signals) -> Callable[[Job, int], None]:
        return lambda job, rank: os.kill(job.pid_of(rank), number)

    def ordered(how: str) -> Callable[[Job, int], None]:
        return lambda job, rank: _order(job.folder / "events" / f"strike-{rank}", how)

    found = {
        "killed": signalled(signal.SIGKILL),
        "stopped": signalled(signal.SIGSTOP),
        "exception": ordered("raise"),
        "node lost": lambda job, rank: job.kill(_holder_of(job, rank)),
    }
    return found | ({"GPU stands": ordered("stand")} if on_gpu else {})


def _order(path: Path, how: str) -> None:
    path.with_suffix(".part").write_text(how)
    path.with_suffix(".part").rename(path)


def _holder_of(job: Job, rank: int) -> int:
    """The process above a rank that holds its node."""
    holders = {int(path.read_text()) for path in job.folder.glob("run/nodes/*/holder.pid")}
    pid = job.pid_of(rank)
    while pid > 1 and pid not in holders:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    if pid <= 1:
        raise Failed(f"nobody holds rank {rank}")
    return pid


def exactness(kind: str, *, on_gpu: bool, env: dict[str, str], seed: int = 1) -> Exactness:
    """Play the job twice, and strike the second time."""
    calm, _ = _play(kind, {}, env, seed)
    blows = strikes(on_gpu)
    struck, took = _play(kind, blows, env, seed)
    print(f"  {kind}: weights {'equal' if struck == calm else 'DIFFER'}", flush=True)
    return Exactness(kind=kind, strikes=tuple(blows), stepping_s=tuple(took), equal=struck == calm)


def by_torchrun(
    names: tuple[str, ...], *, on_gpu: bool, env: dict[str, str], limit_s: float
) -> dict[str, float | None]:
    """Seconds from a strike to the next step of all ranks under torchrun, each in a job of its own; None: none came."""
    found: dict[str, float | None] = {}
    for name in names:
        with Job(RANKS, script=SCRIPT) as job:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
            command.append("--max-restarts=99")
            script = [str(SCRIPT), f"--events={job.folder / 'events'}", "--kind=ddp", "--steps=100000"]
            job.spawn([*command, *script], {**env, **FRESH_STORE})
            if job.wait_steps(APART, None, LIMIT_S) is None:
                raise Failed(f"torchrun: no {APART} steps before '{name}':\n{job.last_words(30)}")
            fault = job.fault()
            strikes(on_gpu)[name](job, RANKS - 1)
            back_at = job.wait_steps(1, fault, limit_s)
            found[name] = round(back_at - fault.at, 2) if back_at else None
            print(f"  torchrun, {name}: stepping after {found[name]} s", flush=True)
    return found


def _play(
    kind: str, blows: dict[str, Callable[[Job, int], None]], env: dict[str, str], seed: int
) -> tuple[list[str], list[float]]:
    chance, took = random.Random(seed), list[float]()
    with Job(RANKS, script=SCRIPT) as job:
        flags = ("--nnodes=4", "--nproc-per-node=1", "--standbys=2", "--max-restarts=99")
        script = [str(SCRIPT), f"--events={job.folder / 'events'}", f"--kind={kind}", f"--steps={STEPS}"]
        launcher = job.spawn([*holdfast(job.folder / "run", *flags), *script], env)
        fault = None
        for name, strike in blows.items():
            if job.wait_steps(APART, fault, LIMIT_S) is None:
                raise Failed(f"{kind}: no {APART} steps before '{name}':\n{job.last_words(30)}")
            fault = job.fault()
            strike(job, chance.randrange(RANKS))
            if (back_at := job.wait_steps(1, fault, LIMIT_S)) is None:
                raise Failed(f"{kind}: no step after '{name}':\n{job.last_words(30)}")
            took.append(round(back_at - fault.at, 2))
            print(f"  {kind}, {name}: stepping after {took[-1]} s", flush=True)
        launcher.wait(LIMIT_S + STEPS)
        found = [job.folder / "events" / f"digest-{rank}" for rank in range(RANKS)]
        if not all(path.exists() for path in found):
            raise Failed(f"{kind}: the job did not come to its end:\n{job.last_words(30)}")
        return [path.read_text() for path in found], took
