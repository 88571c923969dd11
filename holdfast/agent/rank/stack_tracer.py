"""Traces all training processes of this node at one instant: their stacks by py-spy, and what the kernel reports.

py-spy reads a process's memory without stopping the process (`--nonblocking`). To stop it first would fail on a process
that is stopped, and hang on a frozen one. A dump that makes no sense is taken again, because frames may change
meanwhile. A request for native frames does stop each rank, for some milliseconds. Where py-spy is missing or not
permitted, ranks report their own stacks through their flight logs.
"""

import asyncio
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path

import msgspec

from holdfast.agent.agent_clock import AgentClock
from holdfast.agent.masked_news import mask_trace
from holdfast.agent.rank.nccl_ras import ask_ras
from holdfast.agent.rank.progress_slots import ProgressSlots
from holdfast.agent.system import procfs
from holdfast.agent.system.procfs import ProcessStat
from holdfast.core.diagnose.ras_status import telling_lines
from holdfast.core.diagnose.suspect_hang_timeout import sleeps_inside
from holdfast.core.incident.incident_text import describe_exit
from holdfast.decoding import make_decoder
from holdfast.logs.secret_masking import Masker, make_secret_masker
from holdfast.model.rank_traces import Flight, Frame, Process, Thread, Trace
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import TraceRequest
from holdfast.wire.holder_messages import HolderRank
from holdfast.wire.rank_memory import flight_log_reader, slot_reader
from holdfast.wire.rank_memory.flight_log_reader import FlightReport
from holdfast.wire.rank_memory.flight_log_writer import flight_log_offset

TRACED = 256  # processes of a node
_THREADS = 4  # of a process, the main one first
_FRAMES = 64  # of a thread
_OUTER = 16  # of these from the outer end
_TRIES = 3
_REASON_CHARS = 200
_AT_ONCE = max(4, min(32, 2 * (os.cpu_count() or 1)))
_ENVELOPE = 1 << 10  # of a message around a trace
_RAS_S = 1.2  # by then it says which ranks have not answered it; nobody is named later for it
_ASK_S = 1.5  # a rank that can answer does so by then
_OURS = (
    "/holdfast/client/boot/zygote.py",
    "/holdfast/client/boot/script_runner.py",
    "<frozen runpy>",
)  # below every script
_RECORDER = "/holdfast/client/training/rank_flight_recorder.py"
_WRAPPERS = "/holdfast/client/training/p2p_counts.py"  # of torch's own functions, between the script and torch
TOO_LARGE = "the stacks are too large to send"
_FORBIDDEN = ("permission denied", "operation not permitted")


class NoStacks(StrEnum):
    """Reasons why a process's stacks could not be read. A trace may add a detail to a reason."""

    CROWDED = f"not sampled: the node has more than {TRACED} processes"
    LATE = "not sampled: no time was left"
    OTHER_PID = "gone: its pid now belongs to another process"
    ENDED = "gone: it has ended"
    ENDED_MEANWHILE = "gone: it ended while it was sampled"
    NOT_INSTALLED = "py-spy is not installed in the node's environment"
    NOT_STARTED = "py-spy cannot be run"
    FORBIDDEN = "py-spy may not read the process (ptrace is not permitted)"
    FAILED = "py-spy failed"
    UNFINISHED = "py-spy did not finish"
    UNREADABLE = "py-spy printed something other than stacks"
    NO_THREADS = "py-spy found no Python threads"
    NO_PYTHON = "the rank itself did not answer either, so it runs no Python code"


class StackRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which ranks to trace, how, and for how long."""

    ranks: tuple[HolderRank, ...]
    deadline_s: float
    native: bool = False
    offset_s: float = 0.0  # controller's clock minus ours


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int | None = None


class _SpyThread(msgspec.Struct):
    frames: list[_SpyFrame]
    os_thread_id: int | None = None
    thread_name: str | None = None


_dump = make_decoder(msgspec.json.Decoder(list[_SpyThread]))
Subject = tuple[int, ProcessStat, bool]  # rank, process, whether it is a child
Stacks = tuple[tuple[Thread, ...], str]  # or why there are none


def find_spy() -> str | None:
    """Return the path of this environment's py-spy, or else of any on the PATH; None if there is none."""
    ours = Path(sys.executable).with_name("py-spy")
    return str(ours) if ours.exists() else shutil.which("py-spy")


class StackTracer:
    def __init__(
        self,
        node: str,
        nproc: int,
        clock: AgentClock,
        spy: str | None = None,
        ras: str = "",
        *,
        mask: Masker | None = None,
    ) -> None:
        """`ras` is the address at which ranks answer for NCCL; empty if none does."""
        self._mask = mask or make_secret_masker()
        self._node = node
        self._nproc = nproc
        self._clock = clock
        self._spy = spy
        self._ras = ras
        self._starts: dict[tuple[str, int], int] = {}  # when ranks were born, by key and pid

    def watch_ranks(self, ranks: Iterable[HolderRank]) -> None:
        """Record when these ranks started, so that another process with a reused pid is not taken for one of them."""
        known = {}
        for rank in ranks:
            born = self._starts.get((rank.key, rank.pid))
            if born is None and (seen := procfs.read_stat(rank.pid)):
                born = seen.start
            known[rank.key, rank.pid] = born if born is not None else -1
        self._starts = known

    def take_trace(self, asked: StackRequest, arena: mmap.mmap | memoryview | None) -> Trace:
        """Trace all processes of the requested ranks; block until the deadline, or a little longer."""
        began_at, began = self._clock.wall(), self._clock.monotonic()
        until = began + asked.deadline_s
        alive, lost = self._known_ranks(asked.ranks)
        children = procfs.list_descendants(seen.pid for _, seen, _ in alive)
        subjects = alive + [(rank, child, True) for rank, seen, _ in alive for child in children[seen.pid]]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            ras = pool.submit(self._read_ras, asked)
            looks = [pool.submit(self._spy_stacks, s, until, asked.native) for s in subjects[:TRACED]]
            stacks = [look.result() for look in looks]
        stacks += [((), NoStacks.CROWDED)] * (len(subjects) - len(stacks))
        told = self._read_flights(arena, asked) if arena is not None else {}
        slots: dict[int, slot_reader.SlotReading] = {}
        if arena is not None:
            stacks = self._ask_ranks(arena, subjects, stacks, until)
            slots = {r.rank: r for i in range(self._nproc) if (r := slot_reader.read_slot(arena, i))}
        found = [self._describe_process(s, one, slots.get(s[0])) for s, one in zip(subjects, stacks, strict=True)]
        trace = Trace(
            node=self._node,
            at=began_at + asked.offset_s,
            processes=(*found, *lost),
            flights=tuple(told.values()),
            ras=ras.result(),
            took_s=self._clock.monotonic() - began,
        )
        return mask_trace(self._mask, trace)

    def _known_ranks(self, ranks: Sequence[HolderRank]) -> tuple[list[Subject], list[Process]]:
        """Return the ranks whose pids still belong to them, and a record of each rank that is gone."""
        self.watch_ranks(ranks)
        alive: list[Subject] = []
        lost = []
        for held in ranks:
            rank, seen = held.rank_key.rank, procfs.read_stat(held.pid)
            if held.code is None and seen and seen.start == self._starts[held.key, held.pid]:
                alive.append((rank, seen, False))
            else:
                why: str = NoStacks.OTHER_PID if seen and held.code is None else NoStacks.ENDED
                why += f" ({describe_exit(held.code)})" if held.code is not None else ""
                lost.append(Process(node=self._node, rank=rank, pid=held.pid, state="X", error=why))
        return alive, lost

    def _describe_process(self, subject: Subject, stacks: Stacks, told: slot_reader.SlotReading | None) -> Process:
        rank, seen, child = subject
        now = procfs.read_stat(seen.pid)
        ending = told.ending if told is not None and not child else ""
        if now is None or now.start != seen.start:
            # While we looked, so what we saw may be another's. It is no case for this look: how it ended will be told.
            gone = Process(node=self._node, rank=rank, pid=seen.pid, child=child, name=seen.name, ending=ending)
            return msgspec.structs.replace(gone, error=NoStacks.ENDED_MEANWHILE)
        return Process(
            node=self._node,
            rank=rank,
            pid=seen.pid,
            child=child,
            name=seen.name,
            state=seen.state,
            cpu_s=seen.cpu_s,
            io_bytes=procfs.io_bytes(seen.pid),
            threads=stacks[0],
            error=stacks[1],
            steps=child and told is not None and told.claimed and told.pid == seen.pid,
            ending=ending,
        )

    # --- py-spy ------------------------------------------------------------------------------------------------

    def _spy_stacks(self, subject: Subject, until: float, native: bool) -> Stacks:
        pid, stopped = subject[1].pid, subject[1].state in ("T", "t")
        spy = self._spy or find_spy()
        if spy is None:
            return (), NoStacks.NOT_INSTALLED
        way = ("--native",) if native and not stopped else ("--nonblocking",)
        threads: tuple[Thread, ...] = ()
        error = ""
        for _ in range(_TRIES):
            left_s = until - self._clock.monotonic()
            if left_s <= 0:
                return (), error or NoStacks.LATE
            threads, error, again = _run_spy([spy, "dump", "--json", *way, "--pid", str(pid)], pid, left_s)
            if not again:
                break
        return threads, error

    def _read_ras(self, asked: StackRequest) -> str:
        """Return what NCCL's RAS reports about the job; "" unless rank 0 is here, as one report covers all ranks."""
        if not self._ras or all(held.rank_key.rank for held in asked.ranks):
            return ""
        return telling_lines(ask_ras(self._ras, min(asked.deadline_s, _RAS_S), self._clock))

    # --- asking the ranks themselves ---------------------------------------------------------------------------

    def read_reports(self, arena: mmap.mmap | memoryview, generation: int, offset_s: float) -> dict[int, FlightReport]:
        """Return what each rank of a generation last wrote about its collectives."""
        logs = [
            flight_log_reader.read_flight(arena, flight_log_offset(self._nproc, i), self._node, offset_s)
            for i in range(self._nproc)
        ]
        return {told.flight.rank: told for told in logs if told and told.generation == generation}

    def _read_flights(self, arena: mmap.mmap | memoryview, asked: StackRequest) -> dict[int, Flight]:
        pids = {held.pid for held in asked.ranks}
        logs = [
            flight_log_reader.read_flight(arena, flight_log_offset(self._nproc, i), self._node, asked.offset_s)
            for i in range(self._nproc)
        ]
        return {told.flight.rank: told.flight for told in logs if told and told.pid in pids}

    def _ask_ranks(
        self, arena: mmap.mmap | memoryview, subjects: list[Subject], stacks: list[Stacks], until: float
    ) -> list[Stacks]:
        """Return the stacks. Where py-spy failed, use those that the rank itself reports, if they come in time."""
        until = min(until, self._clock.monotonic() + _ASK_S)
        logs = {
            pid: at for i in range(self._nproc) if (pid := _log_owner(arena, at := flight_log_offset(self._nproc, i)))
        }
        open_to_us = {
            number: (logs[seen.pid], flight_log_reader.ask_for_stacks(arena, logs[seen.pid]))
            for number, (_, seen, child) in enumerate(subjects)
            if stacks[number][1] and not child and seen.pid in logs and seen.state not in ("T", "t", "Z")
        }
        answered = dict(enumerate(stacks))
        while open_to_us and self._clock.monotonic() < until:
            for number, (at, question) in list(open_to_us.items()):
                threads = flight_log_reader.read_stacks(arena, at, question)
                if threads is not None:
                    answered[number] = (_trim_threads(threads, subjects[number][1].pid), "")
                    del open_to_us[number]
            time.sleep(0.02)
        for number in open_to_us:
            answered[number] = (
                (),
                f"{stacks[number][1]}; {NoStacks.NO_PYTHON}",
            )
        return list(answered.values())


class NodeTracer:
    """Traces this node's ranks in a thread, one request after another."""

    def __init__(self, tracer: StackTracer, slots: ProgressSlots) -> None:
        self._tracer = tracer
        self._slots = slots
        self._turn = asyncio.Lock()

    def watch_ranks(self, ranks: Iterable[HolderRank]) -> None:
        self._tracer.watch_ranks(ranks)

    async def trace_ranks(self, ranks: tuple[HolderRank, ...], look: TraceRequest, offset_s: float) -> Trace:
        asked = StackRequest(ranks=ranks, deadline_s=look.deadline_s, native=look.native, offset_s=offset_s)
        async with self._turn:
            trace = await asyncio.to_thread(self._tracer.take_trace, asked, self._slots.arena)
        return fit_trace(trace, agent_messages.MAX_BYTES - _ENVELOPE)

    def read_reports(self, generation: int, offset_s: float) -> dict[int, FlightReport]:
        """Return what each rank of a generation last wrote about its collectives."""
        arena = self._slots.arena
        return {} if arena is None else self._tracer.read_reports(arena, generation, offset_s)


def _log_owner(arena: mmap.mmap | memoryview, at: int) -> int:
    """Return the pid of the rank that last wrote to the flight log at this offset; 0 if there is none."""
    told = flight_log_reader.read_flight(arena, at, "")
    return told.pid if told else 0


def _run_spy(argv: list[str], pid: int, left_s: float) -> tuple[tuple[Thread, ...], str, bool]:
    """Run py-spy; return the stacks, the reason why there are none, and whether a retry may help."""
    try:
        ran = subprocess.run(argv, capture_output=True, timeout=left_s, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        return (), f"{NoStacks.UNFINISHED} in {left_s:.1f} s", False
    except OSError as e:
        return (), f"{NoStacks.NOT_STARTED}: {e.strerror}", False
    if ran.returncode != 0:
        text = ran.stderr.decode(errors="replace")
        if any(word in text.lower() for word in _FORBIDDEN):
            return (), NoStacks.FORBIDDEN, False
        said = make_secret_masker().mask_last_line(text, _REASON_CHARS) or "no reason given"
        return (), f"{NoStacks.FAILED}: {said}", True
    try:
        found = _dump(ran.stdout)
    except msgspec.DecodeError:
        return (), NoStacks.UNREADABLE, True
    threads = [_make_thread(thread, pid) for thread in found]
    # A thread that runs may show no frames at an instant; the main one always has some.
    return (_trim_threads(threads, pid), "", False) if threads else ((), NoStacks.NO_THREADS, True)


def _make_thread(found: _SpyThread, pid: int) -> Thread:
    frames = [Frame(f.name, f.filename, f.line or 0) for f in reversed(found.frames)]
    main = found.os_thread_id == pid or (found.os_thread_id is None and found.thread_name == "MainThread")
    return Thread(name=found.thread_name or "", tid=found.os_thread_id or 0, main=main, frames=tuple(frames))


def _trim_threads(threads: Iterable[Thread], pid: int) -> tuple[Thread, ...]:
    """Return the main thread and a few others, with stacks of bounded depth. holdfast's recorder thread is left out.
    Threads that may wait for something outside the job come first: a single one decides how long the job waits."""
    kept = [t for t in threads if not any(f.file.endswith(_RECORDER) for f in t.frames)]
    found = [msgspec.structs.replace(t, sleeps_in=procfs.sleeps_in(pid, t.tid)) for t in kept]
    found.sort(key=lambda t: (not t.main, sleeps_inside(t.sleeps_in), -len(t.frames)))
    return tuple(msgspec.structs.replace(t, frames=_trim_frames(t.frames)) for t in found[:_THREADS])


def _trim_frames(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    frames = tuple(frame for frame in frames if not frame.file.endswith(_WRAPPERS))
    ours = [number for number, frame in enumerate(frames[:_OUTER]) if frame.file.endswith(_OURS)]
    own = frames[ours[-1] + 1 :] if ours and len(frames) > ours[-1] + 1 else frames
    if len(own) > _FRAMES:
        own = own[:_OUTER] + own[_OUTER - _FRAMES :]
    return own


def fit_trace(trace: Trace, limit_bytes: int) -> Trace:
    """Return the trace, shortened as far as the limit requires: to main threads, then to main threads of ranks, then to
    processes without threads, and at last to nothing but the error that it is too large."""
    cuts = (
        lambda p: p.threads,
        lambda p: tuple(t for t in p.threads if t.main),
        lambda p: () if p.child else tuple(t for t in p.threads if t.main),
        lambda p: (),
    )
    for cut in cuts:
        processes = tuple(msgspec.structs.replace(p, threads=cut(p)) for p in trace.processes)
        smaller = msgspec.structs.replace(trace, processes=processes)
        if len(msgspec.msgpack.encode(smaller)) <= limit_bytes:
            return smaller
    return msgspec.structs.replace(trace, processes=(), flights=(), error=TOO_LARGE)
