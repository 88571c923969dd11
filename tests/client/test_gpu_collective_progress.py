"""How far the GPU has come, from entries as torch's recorder has them."""

import mmap
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.client.training.gpu_collective_progress import GpuProgress, find_gpu, held_gpu_s, last_completed
from holdfast.client.training.p2p_progress import find_groups_across
from holdfast.client.training.rank_flight_recorder import FlightRecorder
from holdfast.model.rank_traces import Collective
from holdfast.wire.rank_memory import flight_log_reader
from holdfast.wire.rank_memory.flight_log_writer import ChannelState, FlightLog, flight_log_offset, slot_memory_bytes

AT = flight_log_offset(1, 0)


def entry(seq: int, state: str = "completed", *, group: str = "0", at: float = 0.0, took_s: float = 0.5) -> Any:
    """A collective that was entered at `at`; a completed one ended one second later."""
    created = at or 1000.0 + seq
    found: dict[str, Any] = {"record_id": seq, "pg_id": int(group), "process_group": (group, "x")}
    found |= {"collective_seq_id": seq, "p2p_seq_id": 0, "profiling_name": "nccl:all_reduce", "is_p2p": False}
    found |= {"time_created_ns": int(created * 1e9), "state": state, "retired": state == "completed"}
    found |= {"time_discovered_started_ns": None, "time_discovered_completed_ns": None}
    if state != "scheduled":
        found["time_discovered_started_ns"] = int((created + 1 - took_s) * 1e9)
    if state == "completed":
        found |= {"time_discovered_completed_ns": int((created + 1) * 1e9), "duration_ms": took_s * 1e3}
    return found


def without_timing(found: Any) -> Any:
    return {key: value for key, value in found.items() if key != "duration_ms"} | {"time_discovered_started_ns": None}


def status(started: int, completed: int) -> dict[str, int]:
    return {"last_enqueued_collective": 99, "last_started_collective": started, "last_completed_collective": completed}


def test_the_newest_that_has_begun() -> None:
    entries = [entry(40), entry(41, "started"), entry(42, "scheduled"), entry(43, "scheduled")]
    assert GpuProgress().on_entries(entries, None) == (41, "all_reduce", 1042.0, 0.5)
    entries = [entry(40), entry(41, "scheduled")]
    assert GpuProgress().on_entries(entries, None) == (40, "all_reduce", 1041.0, 0.5)
    assert GpuProgress().on_entries([entry(40)], None) == (40, "all_reduce", 0.0, 0.5), "the host has entered no other"


def test_what_nobody_tells_stays_unknown() -> None:
    untimed = [without_timing(entry(40)), without_timing(entry(41, "scheduled"))]
    assert GpuProgress().on_entries(untimed, status(-1, 40)) is None
    assert GpuProgress().on_entries([entry(150, "scheduled")], status(41, 40)) == (41, "", 1150.0, 0.0)
    gloo = [entry(40) | {"profiling_name": "gloo:all_reduce"}]
    assert GpuProgress().on_entries(gloo, status(40, 40)) is None
    first = [entry(1, "scheduled")]
    assert GpuProgress().on_entries(first, status(-1, -1)) is None, "perhaps it has no timing"
    assert GpuProgress().on_entries(first, status(-1, -1), True) == (0, "", 1001.0, 0.0), "another group has"
    assert GpuProgress().on_entries(gloo, status(40, 40), True) is None


def test_hosts_that_are_further_ahead_than_the_buffer_holds() -> None:
    gpu = GpuProgress()
    gpu.on_entries([entry(40)], None)
    ahead = [entry(seq, "scheduled") for seq in range(150, 214)]
    assert gpu.on_entries(ahead, None) is None, "messages share the status: somewhere before the buffer"
    assert gpu.on_entries(ahead, status(41, 40)) == (41, "", 1150.0, 0.5)
    assert last_completed(ahead, status(41, 40)) == 40 and last_completed(ahead, None) == 149
    assert last_completed([entry(149), *ahead], status(41, 40)) == 149, "the buffer knows it better"


def test_how_long_a_collective_has_waited_for_other_work() -> None:
    gpu = GpuProgress()
    # Entered at 1000, ended at 1001; the next one was entered at 1000.5, and began at 1003.5: it could since 1001.
    first = entry(1, at=1000.0)
    second = entry(2, at=1000.5) | {"time_discovered_completed_ns": int(1004e9)}
    assert gpu.on_entries([first, second], None) == (2, "all_reduce", 0.0, 2.5)
    assert gpu.on_entries([second], None) == (2, "all_reduce", 0.0, 2.5), "seen twice, and counted once"
    # The host itself came late to the third: that is no work of the GPU.
    third = entry(3, at=1050.0)
    assert gpu.on_entries([third, entry(4, "scheduled", at=1050.25)], None) == (3, "all_reduce", 1051.0, 2.5)


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, slot_memory_bytes(1)) as made:
        yield made


def told_groups(memory: mmap.mmap) -> dict[str, Collective]:
    told = flight_log_reader.read_flight(memory, AT, "n0")
    assert told is not None
    return {one.group: one for one in told.flight.groups}


def test_the_log_tells_it(memory: mmap.mmap) -> None:
    recorder = FlightRecorder(FlightLog(memory, AT, generation=1, rank=3), 0)
    recorder.note_collectives([{"entries": [entry(40)]}], {"0": "0"}, 8.0)
    entries = [entry(40), entry(41, "scheduled"), entry(7, group="1"), entry(1, "scheduled", group="2")]
    recorder.note_collectives([{"entries": entries, "pg_status": {"2": status(-1, -1)}}], {"0": "0", "1": "1"}, 9.0)
    groups = told_groups(memory)
    assert (groups["0"].entered, groups["0"].completed, groups["0"].started) == (41, 40, 40)
    assert (groups["0"].started_op, groups["0"].unbegun_since) == ("all_reduce", 1041.0)
    assert (groups["2"].entered, groups["2"].completed, groups["2"].started) == (1, 0, 0)
    assert (groups["1"].started, groups["1"].unbegun_since, groups["1"].unbegun_s) == (7, 0.0, 0.5)


def test_a_group_that_left_the_buffer_may_be_at_work(memory: mmap.mmap) -> None:
    recorder = FlightRecorder(FlightLog(memory, AT, generation=1, rank=3), 0)
    names = {"0": "0", "1": "1"}
    recorder.note_collectives([{"entries": [entry(7, group="1"), entry(8, "scheduled", group="1")]}], names, 1.0)
    later = [entry(40), entry(41, "scheduled")]
    recorder.note_collectives([{"entries": later, "pg_status": {"1": status(8, 7)}}], names, 2.0)
    one = told_groups(memory)["1"]
    assert (one.entered, one.completed, one.started) == (8, 7, 8)
    recorder.note_collectives([{"entries": later, "pg_status": {"1": status(8, 8)}}], names, 3.0)
    one = told_groups(memory)["1"]
    assert (one.entered, one.completed, one.started, one.unbegun_since) == (8, 8, 8, 0.0)


def test_gloo_beside_nccl_in_one_group_has_numbers_of_its_own(memory: mmap.mmap) -> None:
    recorder = FlightRecorder(FlightLog(memory, AT, generation=1, rank=3), 0)
    gloo = without_timing(entry(3, "scheduled")) | {"profiling_name": "gloo:barrier"}
    recorder.note_collectives([{"entries": [gloo]}, {"entries": [entry(40), entry(41, "scheduled")]}], {"0": "0"}, 1.0)
    groups = told_groups(memory)
    assert (groups["0"].entered, groups["0"].started) == (41, 40)
    assert (groups["0 on CPUs"].entered, groups["0 on CPUs"].started) == (3, None)


def test_a_status_that_counts_messages_too_is_not_believed(memory: mmap.mmap) -> None:
    recorder = FlightRecorder(FlightLog(memory, AT, generation=1, rank=3), 0)
    message = entry(3) | {"is_p2p": True, "profiling_name": "nccl:send 0->1", "p2p_seq_id": 160}
    recorder.note_collectives([{"entries": [message, entry(40)]}], {"0": "0"}, 1.0)
    ahead = [entry(seq, "scheduled") for seq in range(150, 214)]
    recorder.note_collectives([{"entries": ahead, "pg_status": {"0": status(160, 159)}}], {"0": "0"}, 2.0)
    one = told_groups(memory)["0"]
    assert (one.entered, one.completed, one.started) == (213, 149, None)


@pytest.mark.parametrize(
    ("op", "took_ms", "held_s"),
    [
        ("nccl:all_reduce", 250.0, 0.25),
        ("nccl:_all_gather_base", 250.0, 0.25),
        ("nccl:reduce_scatter_tensor_coalesced", 0.0234567, 0.000023),
        ("nccl:all_reduce", 0.0, None),
        ("nccl:all_reduce", None, None),
        ("nccl:broadcast", 250.0, 0.0),  # its root waits for nobody
        ("nccl:reduce", 250.0, 0.0),
        ("nccl:all_to_all", 250.0, 0.0),  # who gets nothing neither
        ("nccl:coalesced", 250.0, 0.0),
    ],
)
def test_how_long_a_collective_held_the_gpu(op: str, took_ms: float | None, held_s: float | None) -> None:
    assert held_gpu_s({"profiling_name": op, "duration_ms": took_ms}) == held_s


def told_arrivals(memory: mmap.mmap) -> dict[tuple[str, int], float | None]:
    told = flight_log_reader.read_flight(memory, AT, "n0")
    assert told is not None
    return {(one.group, one.seq): one.held_s for one in told.arrivals}


def test_a_collective_is_told_of_once_it_is_known_how_long_it_held_the_gpu(memory: mmap.mmap) -> None:
    recorder = FlightRecorder(FlightLog(memory, AT, generation=1, rank=3), 0)
    unknown = {key: value for key, value in entry(41).items() if key != "duration_ms"}  # completed, and not yet retired
    gloo = without_timing(entry(7, group="1")) | {"profiling_name": "gloo:all_reduce"}
    for ahead in (
        [entry(40, took_s=0.25), unknown, entry(42, "started")],
        [entry(seq, "scheduled") for seq in (44, 45)],
    ):
        recorder.note_collectives([{"entries": [*ahead, gloo]}], {"0": "0", "1": "1"}, 8.0, [])
        assert told_arrivals(memory) == {("0", 40): 0.25, ("1", 7): None}
    recorder.note_collectives([{"entries": [entry(41), entry(42, took_s=0.1)]}], {"0": "0"}, 9.0, [])
    assert told_arrivals(memory) == {("0", 40): 0.25, ("0", 41): 0.5, ("0", 42): 0.1, ("1", 7): None}


def test_stages_of_a_pipeline_are_not_compared_by_their_gpus(memory: mmap.mmap) -> None:
    """The first stage is the last one to end a step, by design. Ranks of one stage are alike."""
    members = {"0": {rank: rank for rank in range(4)}, "1": {0: 0, 1: 2}, "2": {0: 2, 1: 3}}
    names = {"0": "0", "1": "1 from rank 0", "2": "2 from rank 2"}
    channels: list[ChannelState] = [("1 from rank 0", 0, 2, 9, 9, 9, 0, 64), ("1 from rank 0", 2, 0, 9, 9, 9, 0, 64)]
    assert find_groups_across(channels, members, names) == {"0", "1 from rank 0"}
    assert find_groups_across([], members, names) == frozenset()
    recorder = FlightRecorder(FlightLog(memory, AT, generation=1, rank=2), 0)
    recorder._across = find_groups_across(channels, members, names)
    entries = [entry(5), entry(6, "started"), entry(5, group="2"), entry(6, "started", group="2")]
    recorder.note_collectives([{"entries": entries}], names, 8.0, channels)
    assert told_arrivals(memory) == {("0", 5): None, ("0", 6): None, ("2 from rank 2", 5): 0.5}


def test_who_has_messages_that_nobody_counts_may_be_in_a_pipeline(memory: mmap.mmap) -> None:
    recorder = FlightRecorder(FlightLog(memory, AT, generation=1, rank=3), 0)
    recorder.note_collectives([{"entries": [entry(5)]}], {"0": "0"}, 8.0)
    assert told_arrivals(memory) == {("0", 5): 0.5}
    message = entry(3) | {"is_p2p": True, "profiling_name": "nccl:send 0->1", "p2p_seq_id": 160}
    recorder.note_collectives([{"entries": [message, entry(6)]}], {"0": "0"}, 9.0)
    assert told_arrivals(memory) == {("0", 5): 0.5, ("0", 6): None}


class Cuda(SimpleNamespace):
    """As `torch.cuda` answers in a process that has touched the GPUs `used`."""

    def as_torch(self, used: tuple[int, ...]) -> SimpleNamespace:
        return SimpleNamespace(cuda=self, _C=SimpleNamespace(_cuda_hasPrimaryContext=lambda number: number in used))

    def is_initialized(self) -> bool:
        return bool(self.begun)

    def device_count(self) -> int:
        return 4

    def get_device_properties(self, number: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"0b6f-{number}") if self.tells else SimpleNamespace()


@pytest.mark.parametrize(
    ("used", "begun", "tells", "found"),
    [
        ((3,), True, True, "0b6f-3"),
        ((0, 2), True, True, "0b6f-2"),  # many scripts touch the first GPU by mistake
        ((0, 3), True, True, ""),
        ((), True, True, ""),
        ((3,), False, True, ""),
        ((3,), True, False, ""),
    ],
)
def test_which_gpu_it_is(
    monkeypatch: pytest.MonkeyPatch, used: tuple[int, ...], begun: bool, tells: bool, found: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", Cuda(begun=begun, tells=tells).as_torch(used))
    assert find_gpu("2") == found
