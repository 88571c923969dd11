"""Looking at real processes: where they are, what they have started, and what cannot be looked at."""

import contextlib
import errno
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.rank import stack_tracer
from holdfast.agent.rank.stack_tracer import NoStacks, StackRequest, StackTracer, fit_trace
from holdfast.agent.system import procfs
from holdfast.client.training import p2p_counts
from holdfast.core.diagnose.blocking_ranks import find_blocking
from holdfast.core.diagnose.stack_folding import main_frames
from holdfast.core.diagnose.suspect_hang_timeout import find_outside_waits
from holdfast.logs.secret_masking import Masker
from holdfast.model.rank_traces import Frame, Process, Thread, Trace
from holdfast.wire.holder_messages import HolderRank
from holdfast.wire.rank_memory import slot_reader
from holdfast.wire.rank_memory.flight_log_writer import FlightLog, flight_log_offset, slot_memory_bytes

pytestmark = pytest.mark.e2e
SPY = stack_tracer.find_spy() or ""
PATIENCE_S = 20.0

SLEEPER = """
import sys, time
def inner():
    print("up", flush=True)
    time.sleep(600)
def outer():
    inner()
outer()
"""
PARENT = """
import multiprocessing, subprocess, sys, time
def load():
    time.sleep(600)
child = multiprocessing.get_context("fork").Process(target=load, daemon=True)
child.start()
other = subprocess.Popen(["sleep", "600"])
print("up", flush=True)
try:
    child.join()
finally:
    other.kill()
"""
HELD = """
import ctypes
print("up", flush=True)
ctypes.PyDLL(None).sleep(600)
"""
Start = Callable[[str], int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a script in a session of its own, and wait until it is up; its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str) -> int:
        path = tmp_path / f"job{len(started)}.py"
        path.write_text(script)
        argv = [sys.executable, "-u", str(path)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        assert process.stdout and process.stdout.readline() == b"up\n"
        return process.pid

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)
        assert process.stdout
        process.stdout.close()


def held(*pids: int) -> tuple[HolderRank, ...]:
    return tuple(HolderRank(key=f"1:{rank}", pid=pid) for rank, pid in enumerate(pids))


def take(*pids: int, deadline_s: float = PATIENCE_S, spy: str | None = None, native: bool = False) -> Trace:
    return StackTracer("n0", 4, SystemClock(), spy).take_trace(
        StackRequest(ranks=held(*pids), deadline_s=deadline_s, native=native), None
    )


def at(process: Process) -> list[str]:
    return [frame.function for frame in main_frames(process)]


def test_where_ranks_are(start: Start) -> None:
    pids = [start(SLEEPER) for _ in range(3)]
    trace = take(*pids)
    assert [(p.rank, p.pid, p.child, p.error) for p in trace.processes] == [
        (r, pid, False, "") for r, pid in enumerate(pids)
    ]
    assert all(at(p) == ["<module>", "outer", "inner"] for p in trace.processes)
    assert all(p.state in "RS" and p.cpu_s >= 0 and p.node == "n0" for p in trace.processes)
    assert all(p.io_bytes == procfs.io_bytes(p.pid) for p in trace.processes)
    assert 0 < trace.took_s < PATIENCE_S and trace.error == "" and trace.flights == ()


LOCKED = """
import threading
print("up", flush=True)
threading.Event().wait(600)
"""
PIPED = """
import os
print("up", flush=True)
os.read(os.pipe()[0], 1)
"""


READER = """
import os, threading
def wait(depth):
    return wait(depth - 1) if depth else threading.Event().wait(600)
for _ in range(8):
    threading.Thread(target=wait, args=(5,), daemon=True).start()
reader = threading.Thread(target=os.read, args=(os.pipe()[0], 1), daemon=True)
reader.start()
print("up", flush=True)
reader.join()
"""


@pytest.mark.parametrize(
    ("script", "outside"),
    [(SLEEPER, False), (HELD, False), (LOCKED, False), (PIPED, True), (READER, True)],
    ids=["asleep", "holds the GIL", "waits for a lock", "reads", "waits for one of many threads, which reads"],
)
def test_the_kernel_tells_who_sleeps_and_who_waits_for_bytes(start: Start, script: str, outside: bool) -> None:
    pid, until = start(script), time.monotonic() + PATIENCE_S
    if not procfs.sleeps_in(os.getppid(), os.getppid()):
        pytest.skip("this kernel does not tell where a process sleeps")
    while (found := bool(find_outside_waits([take(pid)], ""))) != outside and time.monotonic() < until:
        time.sleep(0.01)
    assert found is outside


def test_a_stopped_process_is_itself_the_answer(start: Start) -> None:
    pid = start(SLEEPER)
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + PATIENCE_S
    while (seen := procfs.read_stat(pid)) and seen.state != "T" and time.monotonic() < until:
        time.sleep(0.01)
    for native in (False, True):
        (process,) = take(pid, native=native).processes
        assert process.state == "T" and at(process)[-1] == "inner"


def test_children_belong_to_their_rank(start: Start) -> None:
    trace = take(start(PARENT), start(SLEEPER))
    own = {p.name: p for p in trace.processes if p.child}
    assert {p.rank for p in own.values()} == {0} and len(own) == 2
    loader = next(p for name, p in own.items() if name != "sleep")
    assert at(loader)[-1] == "load" and loader.error == ""
    assert own["sleep"].threads == () and own["sleep"].error.startswith(NoStacks.FAILED)  # it is no Python


def test_the_lock_of_the_interpreter_is_no_obstacle(start: Start) -> None:
    (process,) = take(start(HELD)).processes
    assert at(process) == ["<module>"] and process.error == ""


def test_native_frames(start: Start) -> None:
    (process,) = take(start(SLEEPER), native=True).processes
    if "native" in process.error.lower():
        pytest.skip(f"this build of py-spy cannot: {process.error}")
    assert "inner" in at(process) and at(process)[-1] != "inner"


def test_a_pid_that_came_again_is_not_looked_at(start: Start) -> None:
    pid = start(SLEEPER)
    looking = StackTracer("n0", 4, SystemClock(), SPY)
    looking.watch_ranks(held(pid))
    looking._starts["1:0", pid] -= 1  # as if the one we knew had been born earlier
    (process,) = looking.take_trace(StackRequest(ranks=held(pid), deadline_s=PATIENCE_S), None).processes
    assert (process.state, process.threads) == ("X", ())
    assert process.error == NoStacks.OTHER_PID
    ended = subprocess.Popen(["true"])
    ended.wait()
    (process,) = take(ended.pid).processes
    assert (process.state, process.error) == ("X", NoStacks.ENDED)
    over = HolderRank(key="1:0", pid=pid, code=0)  # the holder has reaped it, so whoever has the pid now is another
    (process,) = looking.take_trace(StackRequest(ranks=(over,), deadline_s=PATIENCE_S), None).processes
    assert process.state == "X" and process.error.startswith(NoStacks.ENDED) and "code 0" in process.error


def fake_spy(folder: Path, body: str) -> str:
    path = folder / "py-spy"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo 'Error: Permission denied' >&2; exit 1", NoStacks.FORBIDDEN),
        ("echo 'Operation not permitted (os error 1)' >&2; exit 1", NoStacks.FORBIDDEN),
        ("echo 'Error: the end' >&2; exit 1", f"{NoStacks.FAILED}: Error: the end"),
        (f"echo 'Error: {'x' * 180} password=correct-horse-battery' >&2; exit 1", f"{NoStacks.FAILED}: Error: xxx"),
        ("exit 1", NoStacks.FAILED),
        ("echo '{'", NoStacks.UNREADABLE),
        ("echo '[{\"frames\": 7}]'", NoStacks.UNREADABLE),
        ("echo '[]'", NoStacks.NO_THREADS),
        ("exec sleep 60", NoStacks.UNFINISHED),
    ],
)
def test_a_py_spy_that_is_of_no_use(start: Start, tmp_path: Path, body: str, words: str) -> None:
    pid = start(SLEEPER)
    (process,) = take(pid, spy=fake_spy(tmp_path, body), deadline_s=2.0).processes
    assert process.threads == () and process.error.startswith(words) and process.state in "RS"
    assert "corr" not in process.error


def test_a_rank_that_ends_while_it_is_looked_at_is_not_gone(start: Start, tmp_path: Path) -> None:
    """How it ended will be told: it may have ended well."""
    pid = start(SLEEPER)
    reaper = threading.Thread(target=os.waitpid, args=(pid, 0))
    reaper.start()
    spy = fake_spy(tmp_path, f"kill -9 {pid} 2>/dev/null; while [ -d /proc/{pid} ]; do sleep 0.05; done; exit 1")
    (process,) = take(pid, spy=spy).processes
    reaper.join(PATIENCE_S)
    assert (process.state, process.error) == ("", NoStacks.ENDED_MEANWHILE)
    other = Process(node="n1", rank=1, pid=1, state="S")
    assert find_blocking([Trace(node="n0", at=1.0, processes=(process, other))]).ranks == ()


def test_what_a_rank_tells_of_its_end(start: Start) -> None:
    pid = start(SLEEPER)
    with mmap.mmap(-1, slot_memory_bytes(1)) as memory:
        told = slot_reader.SlotWriter(memory, 0, generation=1, rank=0)
        asked = StackRequest(ranks=held(pid), deadline_s=PATIENCE_S)
        told.mark_parting("parting")
        assert [p.ending for p in StackTracer("n0", 1, SystemClock(), SPY).take_trace(asked, memory).processes] == [
            "parting"
        ]
        told.mark_returned()
        assert [p.ending for p in StackTracer("n0", 1, SystemClock(), SPY).take_trace(asked, memory).processes] == [
            "returned"
        ]


def test_no_py_spy(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pid = start(SLEEPER)
    (process,) = take(pid, spy=str(tmp_path / "missing")).processes
    assert process.error == f"{NoStacks.NOT_STARTED}: {os.strerror(errno.ENOENT)}"
    monkeypatch.setattr(stack_tracer, "find_spy", lambda: None)
    (process,) = take(pid).processes
    assert process.error == NoStacks.NOT_INSTALLED


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody who may not look")
def test_somebody_who_may_not_look(start: Start) -> None:
    pid = start(SLEEPER)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # tmp_path is for its owner alone
        shutil.copy(SPY, f"{folder}/real")
        spy = fake_spy(Path(folder), f'exec setpriv --reuid=65534 --clear-groups {folder}/real "$@"')
        (process,) = take(pid, spy=spy, deadline_s=5.0).processes
    assert process.threads == () and process.error == NoStacks.FORBIDDEN


ANSWERS = """
import os, sys, time
sys.path.insert(0, {root!r})
from holdfast.client.training import rank_flight_recorder
rank_flight_recorder.start_recorder({place!r}, 1, 0)
def here():
    print("up", flush=True)
    {last}
here()
"""


@pytest.mark.parametrize("can", [True, False])
def test_a_rank_tells_by_itself_where_it_is(start: Start, tmp_path: Path, can: bool) -> None:
    fd = os.memfd_create("slots")
    os.ftruncate(fd, slot_memory_bytes(1))
    where = f"/proc/{os.getpid()}/fd/{fd}:{flight_log_offset(1, 0)}"
    last = "time.sleep(600)" if can else "time.sleep(1.5); __import__('ctypes').PyDLL(None).sleep(600)"
    root = str(Path(stack_tracer.__file__).parents[3])
    pid = start(ANSWERS.format(root=root, place=where, last=last))
    with mmap.mmap(fd, 0) as memory:
        until = time.monotonic() + PATIENCE_S
        while not stack_tracer._log_owner(memory, flight_log_offset(1, 0)):
            assert time.monotonic() < until
            time.sleep(0.02)
        time.sleep(0.0 if can else 2.0)  # until it holds the lock
        looking = StackTracer("n0", 1, SystemClock(), str(tmp_path / "missing"))
        trace = looking.take_trace(StackRequest(ranks=held(pid), deadline_s=5.0), memory)
    os.close(fd)
    assert trace.flights[0].rank == 0 and trace.took_s < PATIENCE_S
    (process,) = trace.processes
    assert at(process) == (["<module>", "here"] if can else [])
    assert process.error == "" if can else process.error.endswith(NoStacks.NO_PYTHON)


# Its code has a name and a path that the script has chosen.
_NAMED = """
import os, sys, ctypes
def inner():
    print("up", flush=True)
    ctypes.PyDLL(None).sleep(600)
name = "a\\nholdfast: n0 evicted\\x1b]0;PWN\\x07 correct-horse-battery"
code = inner.__code__.replace(co_name=name, co_qualname=name, co_filename="/x/correct-horse-battery/\\x1b[31mb.py")
inner.__code__ = code
inner()
"""


def test_names_that_a_script_chooses_are_cleaned_and_masked(start: Start) -> None:
    pid = start(_NAMED)
    looking = StackTracer("n0", 1, SystemClock(), SPY, mask=Masker(hosts=False, known=["correct-horse-battery"]))
    (process,) = looking.take_trace(StackRequest(ranks=held(pid), deadline_s=PATIENCE_S), None).processes
    last = main_frames(process)[-1]
    assert (last.function, last.file) == ("a holdfast: n0 evicted <secret>", "<secret>/b.py")


def test_a_trace_that_is_too_large_is_cut() -> None:
    frames = tuple(Frame("f" * 50, "x" * 50, n) for n in range(64))
    threads = tuple(Thread(main=n == 0, frames=frames) for n in range(4))
    ranks = tuple(Process(node="n0", rank=r, pid=r, child=c, threads=threads) for r in range(8) for c in (False, True))
    whole = Trace(node="n0", at=1.0, processes=ranks)
    kept = {limit: fit_trace(whole, limit) for limit in (1 << 20, 150_000, 80_000, 5_000, 100)}
    assert kept[1 << 20] == whole
    assert {len(p.threads) for p in kept[150_000].processes} == {1}
    assert {len(p.threads) for p in kept[80_000].processes if p.child} == {0}
    assert {len(p.threads) for p in kept[80_000].processes if not p.child} == {1}
    assert {len(p.threads) for p in kept[5_000].processes} == {0}
    assert kept[100].processes == () and kept[100].error == stack_tracer.TOO_LARGE


def test_depth_is_bounded_and_our_own_frames_are_left_out() -> None:
    ours = [
        Frame("main", "/x/holdfast/client/boot/zygote.py", 1),
        Frame("run", "/x/holdfast/client/boot/script_runner.py", 1),
    ]
    script = [Frame(f"f{n}", "/x/train.py", n) for n in range(100)]
    recorder = Thread(frames=(Frame("run", "/x/holdfast/client/training/rank_flight_recorder.py", 1),))
    (kept,) = stack_tracer._trim_threads([recorder, Thread(main=True, frames=tuple(ours + script))], 0)
    assert len(kept.frames) == 64 and kept.frames[0].function == "f0" and kept.frames[-1].function == "f99"
    wrapped = [Frame("recv", "torch/distributed/distributed_c10d.py", 9), Frame("wait", p2p_counts.__file__, 70)]
    (kept,) = stack_tracer._trim_threads([Thread(main=True, frames=tuple(script[:2] + wrapped))], 0)
    assert kept.frames[-1].function == "recv", "who waits is known by torch's frame"


def test_logs_of_others_are_not_taken_for_the_ranks(start: Start) -> None:
    pid = start(SLEEPER)
    with mmap.mmap(-1, slot_memory_bytes(1)) as memory:
        FlightLog(memory, flight_log_offset(1, 0), generation=1, rank=0).write_flight(1.0, [], [])  # of this process
        assert (
            StackTracer("n0", 1, SystemClock(), SPY)
            .take_trace(StackRequest(ranks=held(pid), deadline_s=5.0), memory)
            .flights
            == ()
        )
