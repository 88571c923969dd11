"""What ranks leave in shared memory, whatever it is: slots, flight logs, arenas and what snapshots say."""

import mmap
import struct
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.checkpoint import snapshot_metadata_record
from holdfast.checkpoint.arena import Arena, ArenaError
from holdfast.checkpoint.arena_header import PAGE_BYTES, arena_bytes
from holdfast.wire.rank_memory import flight_log_reader, flight_log_writer, slot_reader
from holdfast.wire.rank_memory.flight_log_writer import HALF_BYTES, REGION_BYTES, STACKS_AT, TOLD_AT
from holdfast.wire.rank_memory.slot_writer import (
    BODY,
    ENTRY_BYTES,
    RECORD_BYTES,
    RING_AT,
    SLOT_BYTES,
    SUM,
    VALUES,
    SlotWriter,
)
from tests.fuzz.making import hostile, mutated, narrow, values


def _written() -> bytes:
    memory = memoryview(bytearray(SLOT_BYTES))
    mine = SlotWriter(memory, 0, generation=3, rank=1)
    mine.enter_phase("training")
    for step in range(20):
        mine.write_values(step, 1.5, 2.5, 0.5, 0.25)
        mine.write_hash(step, 2**64 - 1, 7, 4)
        mine.step(step)
    mine.write_failure("RuntimeError: ü")
    return bytes(memory)


def _looked(image: bytes) -> None:
    buf = memoryview(bytearray(image[:SLOT_BYTES].ljust(SLOT_BYTES, b"\0")))
    if reading := slot_reader.read_slot(buf, 0):
        count, found = slot_reader.read_entries(buf, 0, reading, 0)
        assert count >= 0 and len(found) <= 16
    SlotWriter(buf, 0, generation=1, rank=0).step(1)
    again = slot_reader.read_slot(buf, 0)
    assert again is not None and again.step == 1


@given(hostile(st.just(_written())))
def test_a_slot_of_any_bytes(image: bytes) -> None:
    _looked(image)


@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES), st.binary(min_size=ENTRY_BYTES, max_size=ENTRY_BYTES))
@example(b"\0" * 4 + b"\xff" * (RECORD_BYTES - 4), b"\xff" * ENTRY_BYTES)
def test_a_slot_that_is_whole_and_means_nothing(record: bytes, entry: bytes) -> None:
    """A rank can write anything there, and its checksum."""
    half = SUM.pack(crc32(record[BODY])) + record[SUM.size :]
    body = entry[SUM.size : SUM.size + VALUES.size]
    ring = SUM.pack(crc32(body)) + entry[SUM.size :]
    image = bytearray((half * 2).ljust(RING_AT, b"\0") + ring * 16)
    reading = slot_reader.read_slot(memoryview(image), 0) or slot_reader._parse_reading(record[BODY])
    for index in range(16):  # the ring counts only where its generation is the record's
        at = RING_AT + index * ENTRY_BYTES + SUM.size
        struct.pack_into("<H", image, at + 2, reading.generation & 0xFFFF)
        image[at - SUM.size : at] = SUM.pack(crc32(image[at : at + VALUES.size]))
    slot_reader.read_entries(memoryview(image), 0, reading, 0)
    SlotWriter(memoryview(image), 0, generation=1, rank=0)


_FLIGHT = st.one_of(
    values(flight_log_reader._FlightRecord).map(lambda body: flight_log_writer._encode_body(*body.__struct_fields__)),
    st.just(flight_log_writer._encode_body(1, 2, 3, 4.0, [["world", 1, 2, "all_reduce", 1.0]], [["world", 1, 1.0]])),
    st.just(flight_log_writer._encode_body([1, True, "MainThread", [["main", "a.py", 3]]])),
)


@given(hostile(_FLIGHT), st.integers(0, 2**64 - 1))
@example(b"\xff", 1)
@example(b"[" * 5000, 1)
@example(b'[1,2,3,4,[["\xff",1,1,"",1]],[]]', 1)
def test_a_flight_log_of_any_words(body: bytes, number: int) -> None:
    body = body[: HALF_BYTES - flight_log_writer.HEAD.size]
    memory = memoryview(bytearray(REGION_BYTES))
    for at in (TOLD_AT, TOLD_AT + HALF_BYTES, STACKS_AT):
        flight_log_writer.put_record(memory, at, number, body)
    flight_log_reader.read_flight(memory, 0, "n")
    flight_log_reader.read_stacks(memory, 0, number)


@given(mutated(st.just(flight_log_writer._encode_body(1, 2, 3, 4.0, [], []).ljust(64))), st.binary(max_size=32))
def test_a_flight_log_of_any_bytes(head: bytes, more: bytes) -> None:
    memory = memoryview(bytearray(REGION_BYTES))
    memory[TOLD_AT : TOLD_AT + len(more)] = more
    memory[STACKS_AT : STACKS_AT + min(len(head), 4096)] = head[:4096]
    flight_log_reader.read_flight(memory, 0, "n")
    flight_log_reader.read_stacks(memory, 0, 1)
    asked = flight_log_reader.ask_for_stacks(memory, 0)
    assert asked == 1


def _arena(path: Path) -> bytes:
    arena = Arena.make(str(path), layout=b"l" * 32, image_bytes=100, slots=2, rank=1, world=2)
    written = arena.begin_slot(7, 1)
    assert written is not None
    written.image[:3] = b"abc"
    written.seal()
    arena.write_checksums(written.index)
    return path.read_bytes()


def _used(path: Path) -> None:
    arena = Arena.open(str(path))
    for sealed in arena.list_sealed():
        assert arena.pin(sealed.slot, sealed.seq) in (True, False)
        arena.verify(sealed.slot)
        arena.read_checksums(sealed.slot)
        arena.write_checksums(sealed.slot)
        arena.unpin(sealed.slot)
    if written := arena.begin_slot(8, 1):
        written.image[:1] = b"x"
        written.seal()
    arena.drop_after(7)


@given(data=st.data())
def test_an_arena_of_any_bytes(data: st.DataObject, tmp_path: Path) -> None:
    whole = _arena(tmp_path / "whole")
    changed = bytearray(whole)
    for head in (0, PAGE_BYTES, 3 * PAGE_BYTES):  # of the arena and of both slots
        words = data.draw(mutated(st.just(whole[head : head + 96])))[:96]
        changed[head : head + len(words)] = words
    cut = data.draw(st.sampled_from((len(whole), len(whole) - 1, PAGE_BYTES, 10, len(whole) + PAGE_BYTES)))
    (tmp_path / "arena").write_bytes(bytes(changed)[:cut].ljust(cut, b"\0"))
    narrow(lambda: _used(tmp_path / "arena"), ArenaError)


def _head(tmp_path: Path, slots: int, image_bytes: int) -> Path:
    """An arena that says this of itself, and whose size agrees as far as a file can be so large."""
    path = tmp_path / "arena"
    whole = bytearray(_arena(path))
    struct.pack_into("<IQ", whole, 12, slots, image_bytes)
    with path.open("wb") as file:
        file.write(whole)
        size = arena_bytes(image_bytes, slots)
        file.truncate(size if size < 1 << 40 else len(whole))
    return path


@pytest.mark.parametrize(("offset", "word"), [(48, 0), (48, 2**32 - 1), (60, 2**32 - 1), (36, 2**32 - 1), (40, 0)])
def test_a_slot_of_an_arena_with_one_damaged_word(offset: int, word: int, tmp_path: Path) -> None:
    """How many blocks, who writes, who reads, how large a block: none of it is believed."""
    whole = bytearray(_arena(tmp_path / "arena"))
    for head in (PAGE_BYTES, 3 * PAGE_BYTES):
        struct.pack_into("<I", whole, head + 56, 4)  # it is claimed, so that its writer counts
        struct.pack_into("<I", whole, head + offset, word)
    (tmp_path / "arena").write_bytes(whole)
    _used(tmp_path / "arena")


@given(
    slots=st.sampled_from((0, 1, 2, 3, 2**31, 2**32 - 1)), image_bytes=st.sampled_from((0, 1, 4096, 2**33, 2**64 - 1))
)
@example(slots=0, image_bytes=0)
@example(slots=2**31, image_bytes=0)
@example(slots=1, image_bytes=2**33)
def test_an_arena_that_says_it_is_huge(slots: int, image_bytes: int, tmp_path: Path) -> None:
    path = _head(tmp_path, slots, image_bytes)

    def opened() -> None:
        arena = Arena.open(str(path))
        arena.list_sealed()
        arena.begin_slot(1, 1)

    try:
        narrow(opened, ArenaError)
    finally:
        path.unlink()


@given(
    hostile(values(snapshot_metadata_record.ImageMetadata).map(snapshot_metadata_record.pack_metadata)),
    st.sampled_from((0, 64, 128)),
)
@example(snapshot_metadata_record.MAGIC + (2**63).to_bytes(8, "little"), 0)
@example(snapshot_metadata_record.MAGIC + (4).to_bytes(8, "little") + b"\x81\xa1\xff\xff", 0)
def test_what_a_snapshot_says(content: bytes, at: int) -> None:
    image = memoryview(bytes(at) + content)
    narrow(lambda: snapshot_metadata_record.find_metadata(image), snapshot_metadata_record.ImageMetadataError)
    narrow(lambda: snapshot_metadata_record.unpack_metadata(image[at:]), snapshot_metadata_record.ImageMetadataError)


@given(values(snapshot_metadata_record.ImageMetadata))
def test_what_a_snapshot_said_comes_back(said: snapshot_metadata_record.ImageMetadata) -> None:
    content = snapshot_metadata_record.pack_metadata(said)
    assert (
        snapshot_metadata_record.pack_metadata(snapshot_metadata_record.find_metadata(memoryview(content))) == content
    )
    with mmap.mmap(-1, 2 * PAGE_BYTES) as memory:
        memory[64 : 64 + len(content[:4000])] = content[:4000]
