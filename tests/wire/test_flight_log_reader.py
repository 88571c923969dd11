"""A rank's flight log, from both ends."""

import math
import mmap
import os
import struct
from collections.abc import Iterator

import msgspec
import pytest

from holdfast.model.rank_traces import Arrival, Channel, Collective, Frame
from holdfast.wire.rank_memory import flight_log_reader
from holdfast.wire.rank_memory.flight_log_writer import (
    ARRIVALS,
    GROUPS,
    HALF_BYTES,
    REGION_BYTES,
    STACKS_AT,
    TOLD_AT,
    ChannelState,
    FlightLog,
    GroupArrival,
    GroupState,
    flight_log_offset,
    put_record,
    slot_memory_bytes,
)
from holdfast.wire.rank_memory.slot_writer import SLOT_BYTES


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, slot_memory_bytes(2)) as made:
        yield made


AT = flight_log_offset(2, 1)
GROUP: GroupState = ("0", 6, 5, "all_reduce", "barrier", 100.5, 700.5, (4, "broadcast", 100.25, 2.5))


def test_logs_lie_behind_the_slots_and_apart() -> None:
    assert flight_log_offset(3, 0) >= 3 * SLOT_BYTES and flight_log_offset(3, 0) % mmap.PAGESIZE == 0
    assert (
        flight_log_offset(3, 1) - flight_log_offset(3, 0) == REGION_BYTES
        and slot_memory_bytes(3) == flight_log_offset(3, 2) + REGION_BYTES
    )
    assert flight_log_offset(100, 0) >= 100 * SLOT_BYTES


def test_what_is_told_is_read(memory: mmap.mmap) -> None:
    assert flight_log_reader.read_flight(memory, AT, "n0") is None
    log = FlightLog(memory, AT, generation=3, rank=7)
    log.gpu = "GPU-7"
    log.write_flight(101.0, [GROUP], [("0", 4, 100.0, 0.25), ("1", 5, 99.0, None)])
    told = flight_log_reader.read_flight(memory, AT, "n0", offset_s=10.0)
    assert told is not None
    assert (told.generation, told.pid, told.at) == (3, os.getpid(), 111.0)
    assert (told.flight.node, told.flight.rank, told.flight.at) == ("n0", 7, 111.0)
    expected = Collective(
        group="0", entered=6, completed=5, op="all_reduce", ended_op="barrier", at=110.5, expires_at=710.5
    )
    expected = msgspec.structs.replace(expected, started=4, started_op="broadcast", unbegun_since=110.25, unbegun_s=2.5)
    assert told.flight.groups == (expected,)
    assert told.arrivals == (Arrival("0", 4, 110.0, 0.25), Arrival("1", 5, 109.0)) and told.gpu == "GPU-7"
    assert flight_log_reader.read_flight(memory, flight_log_offset(2, 0), "n0") is None  # another's place
    flight_log_reader.clear_flight(memory, AT)
    assert flight_log_reader.read_flight(memory, AT, "n0") is None


def test_a_torn_record_shows_the_one_before(memory: mmap.mmap) -> None:
    log = FlightLog(memory, AT, generation=1, rank=0)
    for entered in (1, 2):
        log.write_flight(1.0, [("0", entered, entered, "", "", 1.0, 0.0, None)], [])
    newer = AT + TOLD_AT  # the second goes to the first half
    memory[newer + 30] ^= 0xFF
    told = flight_log_reader.read_flight(memory, AT, "n0")
    assert told is not None and told.flight.groups[0].entered == 1


@pytest.mark.parametrize("body", [b"", b"[]", b"[1,2", b'["a"]', b"\xff\xff", b"[1,2,3,4,[[]],[]]"])
def test_a_rank_may_write_anything(memory: mmap.mmap, body: bytes) -> None:
    put_record(memory, AT + TOLD_AT, 9, body)
    put_record(memory, AT + STACKS_AT, 1, body)
    assert flight_log_reader.read_flight(memory, AT, "n0") is None
    assert not flight_log_reader.read_stacks(memory, AT, 1)
    memory[AT + TOLD_AT : AT + TOLD_AT + 16] = struct.pack("<IIQ", 1, 1 << 31, 5)  # longer than there is room
    assert flight_log_reader.read_flight(memory, AT, "n0") is None


@pytest.mark.parametrize(
    ("at", "entered", "held_s"), [(1e308, 1, 0.1), (math.nan, 1, 0.1), (1.0, 2**62, 0.1), (1.0, 1, -1.0)]
)
def test_numbers_that_the_controller_would_refuse_stay_here(
    memory: mmap.mmap, at: float, entered: int, held_s: float
) -> None:
    log = FlightLog(memory, AT, generation=1, rank=0)
    log.write_flight(1.0, [("0", 1, 1, "", "", 1.0, 0.0, None)], [("0", 1, 1.0, 0.1)])
    log.write_flight(1.0, [("0", entered, 1, "", "", at, 0.0, None)], [("0", 1, 1.0, held_s)])
    told = flight_log_reader.read_flight(memory, AT, "n0", offset_s=5.0)
    assert told is not None and told.flight.groups[0].at == 6.0
    assert told.flight.groups[0].entered == 1 and told.arrivals == (Arrival("0", 1, 6.0, 0.1),)  # the one before
    log.write_stacks(1, [(2**62, True, "main", [("f", "f.py", 1)])])
    assert flight_log_reader.read_stacks(memory, AT, 1) is None


def test_too_much_is_cut_the_oldest_first(memory: mmap.mmap) -> None:
    log = FlightLog(memory, AT, generation=1, rank=0)
    groups: list[GroupState] = [
        (f"{n}" * 12, 1 << 52, 1 << 52, "x" * 48, "x" * 48, 1e9 + n, 0.0, None) for n in range(200)
    ]
    came: list[GroupArrival] = [("g" * 48, 1 << 52, 1e9 + n / 7, 1 / 7) for n in range(5000)]
    log.write_flight(1.0, groups, came)
    told = flight_log_reader.read_flight(memory, AT, "n0")
    assert told is not None and 0 < len(told.flight.groups) <= GROUPS and len(told.arrivals) <= ARRIVALS
    assert told.flight.groups[0].at == pytest.approx(1e9 + 199)
    channels: list[ChannelState] = [("\u0416" * 48, n, 0, 1 << 52, None, None, 0, 1 << 52) for n in range(32)]
    log.write_flight(2.0, groups, came, channels)
    told = flight_log_reader.read_flight(memory, AT, "n0")
    assert told is not None and told.at == 2.0 and told.flight.channels is None, "some would seem to be all"
    log.write_flight(3.0, groups[:1], [], [("0", n, 0, n, None, None, 0, 4) for n in range(33)])
    told = flight_log_reader.read_flight(memory, AT, "n0")
    assert told is not None and told.at == 3.0 and told.flight.channels is None
    log.write_flight(4.0, groups[:1], [], [("0", 7, 0, 5, 4, 3, 2, 64)], waits=True)
    told = flight_log_reader.read_flight(memory, AT, "n0")
    assert told is not None and told.flight.waits
    channel = Channel(group="0", source=7, target=0, posted=5, begun=4, ended=3, tag=2, size_bytes=64)
    assert told.flight.channels == (channel,)
    assert memory[AT + TOLD_AT + 2 * HALF_BYTES : AT + REGION_BYTES] == bytes(REGION_BYTES - TOLD_AT - 2 * HALF_BYTES)


def test_a_question_and_its_answer(memory: mmap.mmap) -> None:
    log = FlightLog(memory, AT, generation=1, rank=0)
    assert log.newest_question() == 0
    number = flight_log_reader.ask_for_stacks(memory, AT)
    assert log.newest_question() == number and flight_log_reader.read_stacks(memory, AT, number) is None
    log.write_stacks(number, [(5, True, "", [("f", "a.py", 3)]), (6, False, "", [])])
    found = flight_log_reader.read_stacks(memory, AT, number)
    assert found is not None and found[0].main and found[0].frames == (Frame("f", "a.py", 3),) and found[1].tid == 6
    again = flight_log_reader.ask_for_stacks(memory, AT)
    assert again != number and flight_log_reader.read_stacks(memory, AT, again) is None
    log.write_stacks(again, [(5, True, "", [("f" * 200, "a" * 200, 3)] * 64) for _ in range(40)])  # too long
    assert flight_log_reader.read_stacks(memory, AT, again)


def test_no_place_no_log(memory: mmap.mmap) -> None:
    for at in (-1, slot_memory_bytes(2), slot_memory_bytes(2) - REGION_BYTES + 1):
        with pytest.raises(ValueError, match=str(at)):
            FlightLog(memory, at, generation=1, rank=0)
