"""How long training stands still for a save: memory copy, holdfast and one other way in turns, by one rank or two.

Each of the other ways has its own processes, so that none of them disturbs or outlives the measurement of the next.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from benchmarks._ckpt_io import timed, turned
from benchmarks._ckpt_memory import Memory, grown
from benchmarks._ckpt_state import State
from benchmarks._ckpt_ways import WAYS, Way, others_at_hand, ours, sweep
from benchmarks._harness import free_port
from benchmarks._report import FULL

COPY, OURS = "memcpy", "holdfast"
ROUNDS = 11 if FULL else 7  # beside a way that writes to disk; the first is not counted
BARE_ROUNDS = 61 if FULL else 31  # of holdfast and the memory copy alone
LIMIT_S = 150.0
SAVES = 100  # after which nothing may have grown


class Stalls(msgspec.Struct):
    """What one rank has measured, in seconds; `why`: it could not."""

    bytes: int = 0
    first: dict[str, float] = {}
    took: dict[str, list[float]] = {}
    memory: Memory | None = None
    why: str = ""


def measure(way: str, ranks: int, folder: Path) -> Stalls:
    """All ranks stall as long as the slowest."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="stall-", dir=folder) as scratch:
        jobs = [_start(way, Path(scratch), rank, ranks, port) for rank in range(ranks)]
        until = time.monotonic() + LIMIT_S
        late = False
        for job in jobs:
            try:
                job.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = True
        for job in jobs:
            with suppress(ProcessLookupError):  # what it has started may still run
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        sweep(Path(scratch))
        if late:
            return Stalls(why=f"it took longer than {LIMIT_S:g} s")
        return merged([_said(Path(scratch), rank) for rank in range(ranks)])


def _said(folder: Path, rank: int) -> Stalls:
    try:
        return msgspec.json.decode(Path(folder, f"out-{rank}").read_bytes(), type=Stalls)
    except FileNotFoundError:
        words = Path(folder, f"words-{rank}").read_text(errors="replace").strip().splitlines()
        return Stalls(why=f"its process ended: {words[-1] if words else 'without a word'}")


def merged(found: list[Stalls]) -> Stalls:
    one = found[0]
    if why := next((stalls.why for stalls in found if stalls.why), ""):
        return Stalls(why=why)
    return Stalls(
        bytes=sum(stalls.bytes for stalls in found),
        first={name: max(stalls.first[name] for stalls in found) for name in one.first},
        took={n: [max(turn) for turn in zip(*(stalls.took[n] for stalls in found), strict=True)] for n in one.took},
        memory=one.memory,
    )


def _start(way: str, folder: Path, rank: int, ranks: int, port: int) -> "subprocess.Popen[bytes]":
    """In a session of its own, with an environment as torchrun sets it."""
    env = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    if ranks > 1:
        env["OMP_NUM_THREADS"] = "1"  # of two processors, so that memory copies too have one thread a rank
    command = [sys.executable, __file__, way, str(folder), str(rank)]
    with Path(folder, f"words-{rank}").open("wb") as words:
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=words, start_new_session=True)


def one_rank(way: str, folder: Path) -> Stalls:
    """What one process does."""
    dist.init_process_group("gloo")
    state = State()
    stalls = Stalls(bytes=state.bytes())
    source, target = torch.ones(stalls.bytes, dtype=torch.uint8), torch.zeros(stalls.bytes, dtype=torch.uint8)
    ways = {COPY: Way(lambda: target.copy_(source)), OURS: ours(state, folder)}
    ways[COPY].save()
    if way:
        others_at_hand()
        ways[way] = WAYS[way](state, folder)
    for name in sorted(ways):
        stalls.first[name] = _together(ways[name].save)
        ways[name].settle()
    rounds = ROUNDS if way else BARE_ROUNDS
    for turn in range(rounds):
        for name in turned(sorted(ways), turn):
            stalls.took.setdefault(name, []).append(_together(ways[name].save))
            ways[name].settle()
    stalls.took = {name: took[1:] for name, took in stalls.took.items()}
    if not way:
        stalls.memory = grown(ways[OURS].save, SAVES)
    return stalls


def _together(call: Callable[[], object]) -> float:
    """All ranks at once."""
    dist.barrier()
    return timed(call)


def main(way: str, folder: str, rank: str) -> None:
    warnings.filterwarnings("ignore")
    try:
        stalls = one_rank(way, Path(folder))
    except Exception as e:  # of whatever library: why it is left out is part of the result
        stalls = Stalls(why=f"it does not run here, {type(e).__name__}: {e}".splitlines()[0])
    draft = Path(folder, f"draft-{rank}")
    draft.write_bytes(msgspec.json.encode(stalls))
    draft.rename(Path(folder, f"out-{rank}"))
    os._exit(0)  # not every library ends its threads and processes


if __name__ == "__main__":
    main(*sys.argv[1:])
