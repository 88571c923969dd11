"""A rank's looks at its network, from both ends."""

import mmap
from collections.abc import Iterator

import pytest

from holdfast.core.snapshots.step_network_profile import NetworkSample
from holdfast.wire.rank_memory import flight_log_reader, network_look_reader
from holdfast.wire.rank_memory.flight_log_writer import FlightLog, flight_log_offset, slot_memory_bytes
from holdfast.wire.rank_memory.network_look_writer import LOOK_BYTES, RING, RING_AT, NetworkLookLog

AT = flight_log_offset(2, 1)


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, slot_memory_bytes(2)) as made:
        yield made


def test_looks_are_ordered_and_read(memory: mmap.mmap) -> None:
    log = NetworkLookLog(memory, AT)
    assert log.read_order()[0] == 0
    network_look_reader.order_looks(memory, AT, 12, 0.05)
    assert log.read_order() == (12, 0.05)
    network_look_reader.order_looks(memory, AT, 12, 0.0)
    assert log.read_order()[1] > 0, "not as often as it can"
    log.append_look(5, 10.0, 10.25, busy=True)
    log.append_look(6, 10.5, 10.75, busy=False)
    seen = [NetworkSample(5, 10.0, 10.25, True), NetworkSample(6, 10.5, 10.75, False)]
    assert network_look_reader.read_looks(memory, AT, 0) == (2, seen)
    assert network_look_reader.read_looks(memory, AT, 1) == (2, seen[1:])
    assert network_look_reader.read_looks(memory, AT, 2) == (2, [])
    assert network_look_reader.read_looks(memory, flight_log_offset(2, 0), 0) == (0, [])  # another's


def test_the_newest_looks_stay_and_nothing_else_is_touched(memory: mmap.mmap) -> None:
    flights = FlightLog(memory, AT, generation=1, rank=1)
    flights.write_flight(1.0, [], [])
    log = NetworkLookLog(memory, AT)
    network_look_reader.order_looks(memory, AT, 1000, 0.01)
    for step in range(3 * RING):
        log.append_look(step, 1.0, 2.0, busy=step % 2 == 0)
    newest, looks = network_look_reader.read_looks(memory, AT, 0)
    assert newest == 3 * RING and [one.step for one in looks] == list(range(2 * RING, 3 * RING))
    assert flights.newest_question() == 0 and log.read_order()[0] == 1000
    assert flight_log_reader.read_flight(memory, AT, "n") is not None


def test_a_torn_look_and_impossible_values_are_left_out(memory: mmap.mmap) -> None:
    log = NetworkLookLog(memory, AT)
    for step, begun_at in ((1, 1.0), (2, 2.0), (1 << 60, 1.0), (3, float("nan")), (4, 4.0)):
        log.append_look(step, begun_at, 5.0, busy=False)
    memory[AT + RING_AT + 2 * LOOK_BYTES + 9] ^= 1
    assert [one.step for one in network_look_reader.read_looks(memory, AT, 0)[1]] == [1, 4]
    flight_log_reader.clear_flight(memory, AT)
    assert network_look_reader.read_looks(memory, AT, 0) == (0, [])
