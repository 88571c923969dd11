"""Persisting and loading one rank's state beside raw direct I/O of the same bytes and beside torch's own checkpoints.

The disk of a shared machine is never the same twice: every round takes all sides in turn, and only ratios count.
"""

import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rich.table import Table

from benchmarks._report import FULL, Findings, report
from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.snapshots.snapshot_disk import PacedPulse
from holdfast.checkpoint.checkpoint_publication import publish_checkpoint, staging_folder, write_part
from holdfast.checkpoint.checkpoint_reader import read_part
from holdfast.checkpoint.direct_io import THREADS, make_room, run_in_threads
from holdfast.checkpoint.manifest import BLOCK_BYTES, Author
from holdfast.checkpoint.write_lane import WritePulse

STATE_BYTES = int(os.environ.get("BENCH_STATE_BYTES", "536870912"))
ROUNDS = 19 if FULL else 10  # the first is not counted: caches and allocators settle
TENSOR_BYTES = 4 << 20
_STEPS = 50  # of a few milliseconds each
_BESIDE = "steps beside a write to local disk / alone"
WRITE_GOAL, SAVE_GOAL, READ_GOAL, LOAD_GOAL = 1.25, 3.0, 1.5, 2.0

Sides = dict[str, list[float]]


def state() -> dict[str, Any]:
    """As AdamW's: for every weight two moments and a step."""
    weights = range(max(1, STATE_BYTES // (3 * TENSOR_BYTES)))
    return {
        f"{kind}.{weight}": torch.rand(TENSOR_BYTES // 4)
        for weight in weights
        for kind in ("model", "exp_avg", "exp_avg_sq")
    } | {f"step.{weight}": torch.tensor(1.0) for weight in weights}


def image_of(folder: Path) -> memoryview:
    """The one file of a checkpoint by torch, in memory as an arena has it: page-aligned, and touched."""
    content = (folder / "__0_0.distcp").read_bytes()
    image = mmap.mmap(-1, len(content))
    image[:] = content
    return memoryview(image)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def raw_write(path: Path, image: memoryview) -> None:
    """What the disk takes: the same blocks by as many threads, and nothing else."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    whole = image[: len(image) // BLOCK_BYTES * BLOCK_BYTES]

    def work(turns: Iterator[int]) -> None:
        for at in turns:
            os.pwrite(fd, whole[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES], at * BLOCK_BYTES)

    make_room(fd, len(whole))
    run_in_threads(len(whole) // BLOCK_BYTES, THREADS, work)
    os.fsync(fd)
    os.close(fd)


def raw_read(path: Path, into: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def work(turns: Iterator[int]) -> None:
        for at in turns:
            os.preadv(fd, [into[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES]], at * BLOCK_BYTES)

    run_in_threads(os.fstat(fd).st_size // BLOCK_BYTES, THREADS, work)
    os.close(fd)


def drop_cache(base: Path) -> None:
    """What one side has left in the page cache must not help, and its removal not hinder, the next one."""
    for path in base.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def persist(base: Path, step: int, image: memoryview, metadata: bytes) -> str:
    author = Author(1)
    part = write_part(staging_folder(str(base), step, author), 0, [image])
    return publish_checkpoint(str(base), step, [part], metadata, author=author)


def write_to_disk(base: Path, step: int, image: memoryview, metadata: bytes) -> None:
    """As a keeper writes a floor to its node's disk: one thread that rests as long as it works."""
    author = Author(1)
    pulse = PacedPulse(WritePulse(), SystemClock())
    part = write_part(staging_folder(str(base), step, author), 0, [image], threads=1, pulse=pulse)
    publish_checkpoint(str(base), step, [part], metadata, author=author)


def timed_steps(count: int, weight: torch.Tensor) -> float:
    return timed(lambda: [weight @ weight for _ in range(count)])


def steps_beside(base: Path, image: memoryview) -> list[float]:
    """How much longer steps on all cores take beside such a write than alone, in turns."""
    weight, pairs = torch.rand(512, 512), []
    for step in range(ROUNDS):
        writer = threading.Thread(target=write_to_disk, args=(base / "beside", step, image, b"{}"))
        alone_s = timed_steps(_STEPS, weight)
        writer.start()
        beside_s = timed_steps(_STEPS, weight)
        writer.join()
        shutil.rmtree(base / "beside")
        pairs.append(beside_s / alone_s)
    return pairs[1:]


def turned(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def one_round(base: Path, step: int, image: memoryview, held: dict[str, Any]) -> dict[str, float]:
    """Every side once, in an order that turns from round to round: whoever comes later may find a busier disk."""
    metadata = (base / "first" / ".metadata").read_bytes()
    url, saved, raw, disk = (base / f"{name}{step:08d}" for name in ("step-", "dcp", "raw", "disk"))
    writes: dict[str, Callable[[], object]] = {
        "raw write": lambda: raw_write(raw, image),
        "persist": lambda: persist(base, step, image, metadata),
        "write to local disk": lambda: write_to_disk(disk, step, image, metadata),
        "dcp.save": lambda: dcp.save(held, checkpoint_id=saved, no_dist=True),
    }
    reads: dict[str, Callable[[], object]] = {
        "raw read": lambda: raw_read(raw, image),
        "load": lambda: read_part(str(url), 0, image),
        "dcp.load": lambda: dcp.load(held, checkpoint_id=url, no_dist=True),
    }
    took = {}
    for sides in (writes, reads):
        for side in turned(sorted(sides), step):
            drop_cache(base)
            took[side] = timed(sides[side])
    shutil.rmtree(saved)
    shutil.rmtree(disk)
    shutil.rmtree(url)
    raw.unlink()
    return took


def measure(base: Path) -> Sides:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    held = state()
    dcp.save(held, checkpoint_id=base / "first", no_dist=True)
    image = image_of(base / "first")
    sides: Sides = {}
    for step in range(ROUNDS):
        for side, took in one_round(base, step, image, held).items():
            sides.setdefault(side, []).append(took)
    return {side: took[1:] for side, took in sides.items()} | {_BESIDE: steps_beside(base, image)}


def ratio(sides: Sides, over: str, under: str) -> tuple[float, list[float]]:
    """The median of the ratios of every round, and all of them."""
    pairs = [a / b for a, b in zip(sides[over], sides[under], strict=True)]
    return statistics.median(pairs), pairs


def judge(sides: Sides, table: Table, findings: Findings) -> None:
    """The four ratios that have goals."""
    for name, over, under, goal, at_most in (
        ("persist_over_raw_write", "persist", "raw write", WRITE_GOAL, True),
        ("dcp_save_over_persist", "dcp.save", "persist", SAVE_GOAL, False),
        ("load_over_raw_read", "load", "raw read", READ_GOAL, True),
        ("dcp_load_over_load", "dcp.load", "load", LOAD_GOAL, False),
    ):
        middle, pairs = ratio(sides, over, under)
        findings.figures[name] = round(middle, 3)
        findings.goals[name] = middle <= goal if at_most else middle >= goal
        bound = f"{'at most' if at_most else 'at least'} {goal:g}"
        table.add_row(f"{over} / {under}", f"{middle:.2f}", f"{min(pairs):.2f} to {max(pairs):.2f}", bound)
    for name, pairs in (
        ("local disk / raw write", ratio(sides, "write to local disk", "raw write")[1]),
        (_BESIDE, sides.pop(_BESIDE)),
    ):
        findings.figures[name.replace(" / ", "_over_").replace(" ", "_")] = round(statistics.median(pairs), 3)
        table.add_row(name, f"{statistics.median(pairs):.2f}", f"{min(pairs):.2f} to {max(pairs):.2f}", "")
    for side, took in sides.items():
        findings.figures[f"{side.replace(' ', '_').replace('.', '_')}_s"] = round(statistics.median(took), 3)


def main() -> int:
    # Not /tmp, which is memory on many machines: direct I/O to it would measure nothing.
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=os.environ.get("BENCH_DIR", ".")) as folder:
        sides = measure(Path(folder))
    table = Table(title=f"{STATE_BYTES / 1e6:.0f} MB of state, one rank")
    for column in ("what", "median of pairs", "all pairs", "goal"):
        table.add_column(column)
    findings = Findings()
    judge(sides, table, findings)
    report("ckpt_io", table, findings, {side: list[float | None](took) for side, took in sides.items()})
    return 0 if all(findings.goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
