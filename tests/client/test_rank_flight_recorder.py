"""The recorder in a rank: what it makes of torch's entries, and how little it disturbs."""

import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.training import rank_flight_recorder
from holdfast.client.training.p2p_counts import MessageCounts
from holdfast.client.training.rank_flight_recorder import (
    FlightRecorder,
    _fit_name,
    newest_collective,
    sample_arrivals,
    thread_stacks,
)
from holdfast.wire.rank_memory import flight_log_reader
from holdfast.wire.rank_memory.flight_log_writer import FlightLog, flight_log_offset, slot_memory_bytes
from tests.client.conftest import Zygote

AT = flight_log_offset(1, 0)


def entry(seq: int, *, group: str = "0", retired: bool = True, at: float = 0.0, op: str = "gloo:all_reduce") -> Any:
    found: dict[str, Any] = {"collective_seq_id": seq, "record_id": seq, "process_group": (group, "x")}
    found |= {"retired": retired, "state": "scheduled", "is_p2p": False, "profiling_name": op}
    return found | {"time_created_ns": int((at or 1000 + seq) * 1e9)}


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, slot_memory_bytes(1)) as made:
        yield made


def test_the_newest_of_a_group() -> None:
    assert newest_collective("0", [entry(4), entry(5)]) == ("0", 5, 5, "all_reduce", "all_reduce", 1005.0, 0.0)
    assert newest_collective("0", [entry(4), entry(5, retired=False, op="nccl:_all_gather_base")])[:4] == (
        "0", 5, 4, "_all_gather_base",
    )  # fmt: skip
    assert newest_collective("0", [entry(3, retired=False), entry(4), entry(5, retired=False)])[1:3] == (5, 2)
    assert newest_collective("0", [entry(4, op="gloo:broadcast"), entry(5, retired=False)])[4] == "broadcast"


def test_when_the_oldest_open_collective_times_out() -> None:
    old, new = entry(4, retired=False) | {"timeout_ms": 60_000}, entry(5, retired=False) | {"timeout_ms": 30_000}
    assert newest_collective("0", [old, new])[6] == 1005.0 + 30.0
    assert newest_collective("0", [old, entry(5)])[6] == 1004.0 + 60.0
    assert newest_collective("0", [entry(4), entry(5)])[6] == 0.0
    assert newest_collective("0", [entry(4, retired=False)])[6] == 1004.0 + 1800.0, "gloo's, where it is not told"
    assert newest_collective("0", [entry(4, retired=False, op="nccl:all_reduce")])[6] == 1004.0 + 600.0


@pytest.mark.parametrize("rate", [0.5, 2.0, 8.0, 50.0, 400.0])
def test_ranks_tell_of_the_same_arrivals(rate: float) -> None:
    """Their buffers end a little apart; about four a second are told, and the others tell of most of them too."""
    entries = [entry(seq, at=1000 + seq / rate) for seq in range(1, 2000)]
    one, other = (sample_arrivals(entries[start : start + 64]) for start in (900, 911))
    assert len(one) >= 2 and set(one) & set(other)
    span_s = 64 / rate
    assert len(one) <= max(9.0, 8 * span_s + 1)
    assert all(one[seq] == other[seq] for seq in set(one) & set(other))


@pytest.mark.parametrize("in_a_step", [2, 3, 4, 8, 13])
def test_none_of_the_collectives_of_a_step_is_always_left_out(in_a_step: int) -> None:
    """A rank may be late to one of them only."""
    entries = [entry(seq, at=1000 + seq / (5 * in_a_step)) for seq in range(1, 40 * in_a_step)]
    told: set[int] = set()
    for second in range(1, 8):
        upto = 5 * in_a_step * second
        told |= sample_arrivals(entries[max(0, upto - 64) : upto]).keys()
    assert {seq % in_a_step for seq in told} == set(range(in_a_step))


def test_groups_that_left_the_buffer_are_remembered_as_done(memory: mmap.mmap) -> None:
    recorder = FlightRecorder(FlightLog(memory, AT, generation=1, rank=3), 0)
    names = {"0": "0", "7": "7 from rank 2", "8": "8 from rank 3"}
    p2p = entry(9) | {"is_p2p": True}
    recorder.note_collectives([{"entries": [entry(1, group="7", retired=False), entry(4), p2p]}], names, 1.0)
    recorder.note_collectives([{"entries": [entry(5, retired=False)]}], names, 2.0)
    told = flight_log_reader.read_flight(memory, AT, "n0")
    assert told is not None and told.flight.rank == 3
    groups = {c.group: (c.entered, c.completed) for c in told.flight.groups}
    assert groups == {"0": (5, 4), "7 from rank 2": (1, 1), "8 from rank 3": (0, 0)}
    assert {(a.group, a.seq) for a in told.arrivals} >= {("0", 4), ("0", 5), ("7 from rank 2", 1)}


def test_own_stacks() -> None:
    found: list[Any] = []
    recorder = threading.Thread(target=lambda: found.extend(thread_stacks(0)))
    recorder.start()
    recorder.join()
    (tid, main, _, frames), *others = found
    assert (tid, main) == (threading.main_thread().ident, True)
    assert any(function.startswith("test_own_stacks") for function, _, _ in frames)
    assert recorder.ident not in {tid for tid, *_ in others}


def test_a_name_that_is_too_long_is_cut_between_its_parts() -> None:
    """Nobody could tell that a part of a part is a secret."""
    whole, path = "outer.<locals>.inner", "/srv/job/train.py"
    assert (_fit_name(whole, "."), _fit_name(path, "/")) == (whole, path)
    assert _fit_name(f"/x/{'s' * 190}/{path[1:]}", "/") == path[1:]
    assert _fit_name("s" * 190 + "e" * 20, ".") == "s" * 190 + "e" * 10, "its beginning is known"


SCRIPT = """
import ctypes, os, signal, sys, threading, time
assert threading.active_count() == 1 and threading.enumerate() == [threading.main_thread()]
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(threading.current_thread()))
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.2)
assert got == [threading.main_thread()]
pid = os.fork()
if pid == 0:
    os._exit(len(os.listdir("/proc/self/task")) - 1)
assert os.waitpid(pid, 0)[1] == 0
print("fine", flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.e2e
def test_a_rank_does_not_notice_it(bare: Zygote, tmp_path: Path) -> None:
    fd = os.memfd_create("slots")
    os.ftruncate(fd, slot_memory_bytes(1))
    path = f"/proc/{os.getpid()}/fd/{fd}"
    env = {"HOLDFAST_SLOT": f"{path}:0", "HOLDFAST_FLIGHT": f"{path}:{AT}", "HOLDFAST_GENERATION": "4", "RANK": "2"}
    (tmp_path / "script.py").write_text(SCRIPT)
    (rank,) = bare.forks([env], str(tmp_path / "script.py"), "1.5")
    with mmap.mmap(fd, 0) as memory:
        until = time.monotonic() + 20
        while (told := flight_log_reader.read_flight(memory, AT, "n0")) is None:
            assert time.monotonic() < until, "nothing was told"
            time.sleep(0.02)
        assert (told.generation, told.flight.rank, told.pid, told.flight.groups) == (4, 2, rank.pid, ())
        number = flight_log_reader.ask_for_stacks(memory, AT)
        while not (threads := flight_log_reader.read_stacks(memory, AT, number)):
            assert time.monotonic() < until, "no answer"
            time.sleep(0.02)
        assert [t.main for t in threads] == [True]
        assert threads[0].frames[-1].file.endswith("script.py")
        ended = bare.wait(rank)
        assert (ended.code, ended.out, ended.err) == (0, "fine\n", "")
    os.close(fd)


@pytest.mark.e2e
@pytest.mark.parametrize("log", ["/nowhere:0", "x", ":", "/dev/null:0"])
def test_without_a_place_nothing_happens(bare: Zygote, tmp_path: Path, log: str) -> None:
    fd = os.memfd_create("slots")
    os.ftruncate(fd, slot_memory_bytes(1))
    (tmp_path / "script.py").write_text("import os\nprint(len(os.listdir('/proc/self/task')))")
    env = {"HOLDFAST_SLOT": f"/proc/{os.getpid()}/fd/{fd}:0", "HOLDFAST_FLIGHT": log}
    ended = bare.wait(*bare.forks([env], str(tmp_path / "script.py")))
    assert (ended.code, ended.out, ended.err) == (0, "1\n", "")
    os.close(fd)


class DearRecorder:
    """Dumps of torch's recorder take 30 ms of the processor, and a thread posts messages for a time and then stands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts, self.dumped, self.stood_at = MessageCounts(), list[float](), 0.0
        self.began, self._ends = threading.Event(), threading.Event()
        self.newest: list[FlightRecorder] = []
        monkeypatch.setattr(rank_flight_recorder, "_NEWEST", self.newest)
        monkeypatch.setattr(rank_flight_recorder, "find_counts", lambda: self.counts)
        monkeypatch.setattr(rank_flight_recorder, "_read_dumps", self._dump)

    def _dump(self) -> list[Any]:
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass
        self.dumped.append(time.monotonic())
        return []

    def train(self, seconds: float) -> None:
        """It is nearly always seen in the same sleep."""
        self.began.set()
        until, posted = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            time.sleep(0.02)
            posted += 1
            self.counts.posted["0", 1, True] = (posted, 0, 64)
        self.stood_at = time.monotonic()
        self._ends.wait(30.0)

    def record(self, log: FlightLog, works_s: float, stands_s: float) -> None:
        trains = threading.Thread(target=self.train, args=(works_s,))
        trains.start()
        assert self.began.wait(10) and trains.ident
        self.newest.append(FlightRecorder(log, trains.ident))
        records = threading.Thread(target=self.newest[0].run)
        records.start()
        trains.join(works_s + stands_s)
        self.newest.clear()
        self._ends.set()
        trains.join(10)
        records.join(10)


def test_a_rank_that_stands_is_recorded_at_once_however_long_a_dump_takes(
    memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large buffer is dumped every ten seconds while the rank works, and soon after it has stopped."""
    dear = DearRecorder(monkeypatch)
    dear.record(FlightLog(memory, AT, generation=1, rank=3), works_s=4.0, stands_s=3.5)
    assert dear.stood_at and len([at for at in dear.dumped if at <= dear.stood_at]) <= 2, "it works, and dumps are dear"
    waiting = [at - dear.stood_at for at in dear.dumped if at > dear.stood_at]
    assert 1 <= len(waiting) <= 3 and 0.5 < waiting[0], waiting
