"""What it costs to see where everybody is: naming over the stacks of 16,384 ranks, a trace of 8 real ones, its pause.

The ranks of the second part meet in an all-reduce every 20 ms, so a pause of any shows as one long round; the longest
rounds with a trace under way stand beside the longest of as many windows without.
"""

import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks._report import FULL, Findings, report
from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.rank.stack_tracer import StackRequest, StackTracer
from holdfast.core.diagnose.blocking_ranks import find_blocking
from holdfast.model.job_and_seats import Seat
from holdfast.model.rank_traces import Collective, Flight, Frame, Process, Thread, Trace
from holdfast.wire.holder_messages import HolderRank
from holdfast.wire.rank_memory.flight_log_writer import flight_log_offset, slot_memory_bytes

WORLD, NPROC, DEPTH = 16384, 8, 40
RANKS = 8
TRACES = 30 if FULL else 8
NAMING_GOAL_S, TRACE_GOAL_S, PAUSE_GOAL_S = 1.0, 0.5, 0.1
WAIT_S = 120.0
SUSPECTS = (4711, 4712, 9000)


def world(scattered: bool = False) -> tuple[list[Trace], tuple[Seat, ...]]:
    """A job of 2,048 nodes as it comes off the wire: no two equal stacks are the same object, or none are equal."""
    traces = []
    for node in range(WORLD // NPROC):
        ranks = range(node * NPROC, (node + 1) * NPROC)
        flights = tuple(Flight(node=f"n{node}", rank=rank, groups=(collective(rank),)) for rank in ranks)
        processes = tuple(process(f"n{node}", rank, scattered) for rank in ranks)
        trace = Trace(node=f"n{node}", at=1.0, processes=processes, flights=flights)
        traces.append(msgspec.msgpack.decode(msgspec.msgpack.encode(trace), type=Trace))
    seats = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=i * NPROC, nproc=NPROC) for i in range(WORLD // NPROC))
    return traces, seats


def collective(rank: int) -> Collective:
    entered = 77 if rank in SUSPECTS else 78
    return Collective(group="0", entered=entered, completed=77, op="all_reduce", at=1.0)


def process(node: str, rank: int, scattered: bool) -> Process:
    # Lines differ as they do where ranks wait at different places of the same functions.
    frames = [
        Frame(f"forward_{n}", f"/opt/env/lib/python3.11/site-packages/torch/nn/{n}.py", n) for n in range(DEPTH - 2)
    ]
    frames.append(Frame(f"step{rank}" if scattered else "step", "/opt/job/train.py", 10 + rank % 7))
    last = (
        ("load", "/opt/job/train.py") if rank in SUSPECTS else ("all_reduce", "torch/distributed/distributed_c10d.py")
    )
    thread = Thread(main=True, frames=(*frames, Frame(*last, 3252)))
    return Process(node=node, rank=rank, pid=rank + 100, state="S", threads=(thread,))


def naming_s(traces: list[Trace], seats: tuple[Seat, ...]) -> float:
    began = time.perf_counter()
    found = find_blocking(traces, seats, (("pp", 8), ("dp", 256), ("tp", 8)))
    took_s = time.perf_counter() - began
    assert found.ranks == SUSPECTS and found.hard, found
    return took_s


class Ranks:
    """Real gloo ranks, as an agent has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        fd = os.memfd_create("holdfast-bench")
        os.ftruncate(fd, slot_memory_bytes(RANKS))
        self.arena = mmap.mmap(fd, 0)
        script = str(Path(__file__).with_name("_trace_ranks.py"))
        root = str(Path(__file__).parents[1])
        env = os.environ | {"WORLD_SIZE": str(RANKS), "TORCH_FR_BUFFER_SIZE": "64", "OMP_NUM_THREADS": "1"}
        self.started = [
            subprocess.Popen(
                [sys.executable, script, str(folder), f"/proc/{os.getpid()}/fd/{fd}:{flight_log_offset(RANKS, rank)}"],
                env=env | {"RANK": str(rank), "PYTHONPATH": root},
                start_new_session=True,
            )
            for rank in range(RANKS)
        ]
        self._await([folder / f"up-{rank}" for rank in range(RANKS)])

    def _await(self, files: list[Path]) -> None:
        until = time.monotonic() + WAIT_S
        while not all(file.exists() for file in files):
            if time.monotonic() > until or any(process.poll() for process in self.started):
                raise SystemExit("the ranks did not come up")
            time.sleep(0.1)

    def held(self) -> tuple[HolderRank, ...]:
        return tuple(HolderRank(key=f"1:{rank}", pid=process.pid) for rank, process in enumerate(self.started))

    def end(self) -> list[dict[str, object]]:
        (self.folder / "finish").touch()
        for process in self.started:
            process.wait(WAIT_S)
        return [json.loads((self.folder / f"rounds-{rank}").read_text()) for rank in range(RANKS)]

    def kill(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()


Window = tuple[float, float]


def traces_s(ranks: Ranks) -> tuple[list[float], list[Window], list[Window]]:
    """What each trace took, and the windows with and without one."""
    tracer = StackTracer("n0", RANKS, SystemClock())
    took, busy, idle = [], [], []
    for _ in range(TRACES):
        time.sleep(0.3)
        began = time.monotonic()
        trace = tracer.take_trace(StackRequest(ranks=ranks.held(), deadline_s=5.0), ranks.arena)
        ended = time.monotonic()
        assert len(trace.processes) == RANKS and not any(p.error for p in trace.processes), trace
        assert len(trace.flights) == RANKS
        took.append(ended - began)
        busy.append((began, ended))
        time.sleep(0.3)
        idle.append((time.monotonic(), time.monotonic() + took[-1]))
        time.sleep(took[-1])
    return took, busy, idle


def longest(told: list[dict[str, object]], windows: list[Window]) -> list[float]:
    """The longest round of any rank in each window."""
    rounds = [(at, took) for one in told for at, took in one["rounds"]]  # type: ignore[attr-defined]
    return [
        max((took for at, took in rounds if at <= end and at + took >= start), default=0.0) for start, end in windows
    ]


def main() -> None:
    findings = Findings()
    naming = [naming_s(*world()) for _ in range(5)]
    scattered = [naming_s(*world(scattered=True)) for _ in range(2)]
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        ranks = Ranks(Path(folder))
        try:
            took, busy, idle = traces_s(ranks)
            told = ranks.end()
        finally:
            ranks.kill()
    with_s, without_s = longest(told, busy), longest(told, idle)
    pause_s = max(0.0, statistics.median(with_s) - statistics.median(without_s))
    dump_ms = 1000 * statistics.median(float(one["dump_s"]) for one in told)  # type: ignore[arg-type]
    table = Table(title="seeing where everybody is")
    for column in ("what", "median", "worst"):
        table.add_column(column, justify="left" if column == "what" else "right")
    table.add_row(f"naming over {WORLD:,} stacks of {DEPTH} frames, s", *_two(naming))
    table.add_row("the same where no two are alike, s", *_two(scattered))
    table.add_row(f"trace of {RANKS} ranks on this host, s", *_two(took))
    table.add_row("longest round of all ranks with a trace under way, s", *_two(with_s))
    table.add_row("longest round of all ranks without, s", *_two(without_s))
    table.add_row("one look at torch's recorder, ms", f"{dump_ms:.2f}", "")
    findings.figures = {
        "naming_s": round(statistics.median(naming), 3),
        "scattered_s": round(statistics.median(scattered), 3),
        "trace_s": round(statistics.median(took), 3),
        "pause_s": round(pause_s, 4),
        "recorder_ms": round(dump_ms, 3),
    }
    findings.goals = {
        "naming_under_1_s": statistics.median(naming) < NAMING_GOAL_S,
        "trace_under_half_a_second": statistics.median(took) < TRACE_GOAL_S,
        "pause_under_100_ms": pause_s < PAUSE_GOAL_S,
    }
    report("diagnose", table, findings, {"naming_s": list(naming), "trace_s": list(took), "with_s": list(with_s)})


def _two(measured: list[float]) -> tuple[str, str]:
    return f"{statistics.median(measured):.3f}", f"{max(measured):.3f}"


if __name__ == "__main__":
    main()
