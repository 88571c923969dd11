"""An arena: what a reader takes is whole and the newest, whatever happened to the writer and whenever."""

import errno
import os
import random
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.checkpoint.arena import DUE, POISONED, VERIFIED, Arena, ArenaError, SealedSnapshot, SnapshotName
from holdfast.checkpoint.arena_header import BLOCK_BYTES, SlotHeader, arena_bytes, is_alive

LAYOUT = bytes(range(32))
IMAGE_BYTES = 40_000


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "arena")


def make(place: str, slots: int = 2, image_bytes: int = IMAGE_BYTES) -> Arena:
    return Arena.make(place, layout=LAYOUT, image_bytes=image_bytes, slots=slots, rank=3, world=8)


def save(arena: Arena, step: int, generation: int = 1) -> int | None:
    slot = arena.begin_slot(step, generation)
    if slot is None:
        return None
    slot.image[:] = fill(step, arena.image_bytes)
    slot.seal()
    return slot.index


def fill(step: int, size: int) -> bytes:
    return struct.pack("<Q", step) * (size // 8)


def steps(arena: Arena) -> list[int]:
    return [sealed.step for sealed in arena.list_sealed()]


def test_it_is_found_again(place: str) -> None:
    made = make(place)
    save(made, 7, generation=2)
    found = Arena.open(place)
    assert (found.layout, found.image_bytes, found.slots, found.rank, found.world) == (LAYOUT, IMAGE_BYTES, 2, 3, 8)
    (sealed,) = found.list_sealed()
    assert (sealed.step, sealed.generation, sealed.flags) == (7, 2, 0)
    assert abs(sealed.at - time.time()) < 60
    assert bytes(found.slot_image(sealed.slot)) == fill(7, IMAGE_BYTES)
    assert os.path.getsize(place) == arena_bytes(IMAGE_BYTES, 2)


def test_by_descriptor() -> None:
    fd = os.memfd_create("arena")
    try:
        save(Arena.make(fd, layout=LAYOUT, image_bytes=8, slots=1), 1)
        assert steps(Arena.open(f"/proc/self/fd/{fd}")) == [1]
    finally:
        os.close(fd)


def test_images_start_on_pages(place: str) -> None:
    arena = make(place, slots=3, image_bytes=3 * BLOCK_BYTES + 1)
    places = [arena.image_at(slot) for slot in range(3)]
    assert all(at % 4096 == 0 for at in places)
    assert all(b - a >= 3 * BLOCK_BYTES + 1 for a, b in pairwise(places))


def test_what_is_no_arena(place: str, tmp_path: Path) -> None:
    def refused() -> str:
        with pytest.raises(ArenaError) as e:
            Arena.open(place)
        assert place in str(e.value)
        return str(e.value).replace(place, "X")

    assert refused().endswith(os.strerror(errno.ENOENT))
    Path(place).write_bytes(b"")
    empty = refused()
    Path(place).write_bytes(bytes(5000))
    strange = refused()
    make(place)
    os.truncate(place, arena_bytes(IMAGE_BYTES, 2) - 4096)
    assert len({empty, strange, refused()}) == 3, "each says what is wrong"
    with pytest.raises(ArenaError):
        make(place, slots=0)
    with pytest.raises(ArenaError):
        make(place).slot_image(2)


def test_the_newest_is_never_overwritten(place: str) -> None:
    arena = make(place)
    for step in range(1, 10):
        slot = arena.begin_slot(step, 1)
        assert slot is not None
        assert steps(arena)[:1] == ([step - 1] if step > 1 else [])
        slot.seal()
        assert steps(arena)[0] == step


def test_a_torn_slot_is_the_first_to_be_reused(place: str) -> None:
    arena = make(place, slots=3)
    for step in (1, 2, 3):
        save(arena, step)
    torn = arena.begin_slot(4, 1)  # and never sealed
    assert torn is not None and steps(arena) == [3, 2]
    again = Arena.open(place)  # by the next generation
    slot = again.begin_slot(4, 2)
    assert slot is not None and slot.index == torn.index
    slot.seal()
    assert steps(again) == [4, 3, 2]


def test_pins(place: str) -> None:
    writer, reader = make(place), Arena.open(place)
    save(writer, 1)
    save(writer, 2)
    two, one = reader.list_sealed()
    assert reader.pin(one.slot, one.seq)
    assert reader.pin(one.slot, one.seq)  # a second thread
    assert save(writer, 3) == two.slot, "the newest, as one that is read is whole"
    reader.unpin(one.slot)
    assert save(writer, 4) == two.slot
    reader.unpin(one.slot)
    assert save(writer, 5) == one.slot
    assert not reader.pin(one.slot, one.seq), "it is another snapshot by now"
    assert save(writer, 6) == two.slot, "a pin that was refused holds nobody up"
    assert writer.skipped == 0


def test_the_only_whole_one_is_not_overwritten(place: str) -> None:
    writer, reader = make(place), Arena.open(place)
    save(writer, 1)
    torn = writer.begin_slot(2, 1)
    assert torn is not None
    reader.pin_own(torn.index)
    assert save(writer, 3) is None and writer.skipped == 1
    assert steps(writer) == [1]
    reader.unpin(torn.index)
    assert save(writer, 3) == torn.index


def test_all_are_read(place: str) -> None:
    writer, reader = make(place), Arena.open(place)
    save(writer, 1)
    save(writer, 2)
    assert all(reader.pin(sealed.slot, sealed.seq) for sealed in reader.list_sealed())
    assert save(writer, 3) is None and writer.skipped == 1


def test_a_pin_of_a_dead_process_counts_for_nothing(place: str) -> None:
    writer = make(place)
    save(writer, 1)
    save(writer, 2)
    child = os.fork()
    if not child:
        reader = Arena.open(place)
        os._exit(0 if all(reader.pin(sealed.slot, sealed.seq) for sealed in reader.list_sealed()) else 1)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert is_alive(child), "nobody knows yet that it ended"
    assert save(writer, 3) is None
    assert os.waitpid(child, 0)[1] == 0
    assert save(writer, 3) is not None


def test_a_begun_slot_cannot_be_pinned(place: str) -> None:
    writer, reader = make(place), Arena.open(place)
    save(writer, 1)
    save(writer, 2)
    one = reader.list_sealed()[1]
    slot = writer.begin_slot(3, 1)
    assert slot is not None and slot.index == one.slot
    assert not reader.pin(one.slot, one.seq)


def test_verified_and_poisoned(place: str) -> None:
    arena = make(place, slots=3)
    first = save(arena, 1)
    assert first is not None
    arena.flag_slot(first, VERIFIED)
    arena.pin_own(first)
    for step in range(2, 8):
        save(arena, step)
    assert set(steps(arena)) == {7, 6, 1}, "one that is held stays beside the two"
    newest = arena.list_sealed()[0]
    arena.flag_slot(newest.slot, POISONED)
    assert save(arena, 8) == newest.slot, "a poisoned one is worth nothing"
    assert [sealed.flags for sealed in arena.list_sealed()] == [0, 0, VERIFIED]


def test_flags_come_with_the_seal(place: str) -> None:
    arena = make(place)
    slot = arena.begin_slot(1, 1, DUE)
    assert slot is not None
    slot.seal()
    assert arena.list_sealed()[0].flags == DUE


def test_of_two_slots_one_stays_free(place: str) -> None:
    arena = make(place)
    for step in (1, 2, 3):
        slot = save(arena, step)
        assert slot is not None
        arena.flag_slot(slot, VERIFIED)
    assert steps(arena) == [3, 2]


def test_drop(place: str) -> None:
    arena = make(place)
    save(arena, 5)
    save(arena, 7)  # a step that other ranks do not have: all went back to 5
    seven, _ = arena.list_sealed()
    arena.drop(seven.slot)
    assert steps(arena) == [5]
    assert save(arena, 6) == seven.slot, "and 5 stays until 6 is sealed"
    assert arena.slot_seq(seven.slot) > seven.seq, "numbers are not used twice"


def test_checksums(place: str) -> None:
    size = 2 * BLOCK_BYTES + 8
    arena = make(place, image_bytes=size)
    slot = save(arena, 9)
    assert slot is not None
    assert arena.read_checksums(slot) == () and arena.verify(slot) == "", "nothing to go by yet"
    sums = arena.write_checksums(slot)
    assert len(sums) == 3 and arena.read_checksums(slot) == sums and arena.verify(slot) == ""
    for at in (0, BLOCK_BYTES, size - 1):
        arena.slot_image(slot)[at] ^= 1
        block = at // BLOCK_BYTES
        assert arena.verify(slot).startswith(f"slot {slot}, step 9: block {block} ")
        arena.slot_image(slot)[at] ^= 1
    assert arena.verify(1 - slot).startswith(f"slot {1 - slot} ")
    assert arena.write_checksums(1 - slot) == ()
    save(arena, 10)
    save(arena, 11)
    assert arena.read_checksums(slot) == (), "checksums of the snapshot before do not count"


def seal_by_device(place: str, arena: Arena) -> None:
    """What queued work does to the words of the oldest claim."""
    claim = arena._claims[0]
    head = SlotHeader(memoryview(arena.memory)[arena.head_at(claim.slot) : arena.image_at(claim.slot)])
    head.seq = claim.seq
    assert claim.name.step not in steps(Arena.open(place))
    head.step, head.generation, head.flags = claim.name.step, claim.name.generation, 0
    head.seq = claim.seq + 1


def test_claims(place: str) -> None:
    writer, reader = make(place), Arena.open(place)
    save(writer, 1)
    save(writer, 2)
    two, one = reader.list_sealed()
    claims = [writer.claim(SnapshotName(step=step, generation=1)) for step in (3, 4, 5)]
    assert [claim.slot for claim in claims if claim] == [one.slot, two.slot, one.slot]
    assert steps(reader) == [2, 1], "nothing was written yet"
    assert not reader.pin(two.slot, two.seq) and not reader.pin(one.slot, one.seq)
    assert writer.begin_slot(6, 1) is None
    for step in (3, 4, 5):
        seal_by_device(place, writer)
        writer.is_settled()
        assert steps(reader) == [step, step - 1]
    assert reader.pin(one.slot, reader.list_sealed()[0].seq), "the claim was kept"
    assert writer.claim(SnapshotName(step=6, generation=1)) is not None
    assert writer.claim(SnapshotName(step=7, generation=1)) is None, "it is read"


def test_a_pinned_slot_is_not_claimed(place: str) -> None:
    writer, reader = make(place), Arena.open(place)
    save(writer, 1)
    save(writer, 2)
    one = reader.list_sealed()[1]
    assert reader.pin(one.slot, one.seq)
    claimed = writer.claim(SnapshotName(step=3, generation=1))
    assert claimed is not None and claimed.slot != one.slot
    assert writer.claim(SnapshotName(step=4, generation=1)) is None and writer.skipped == 1


def test_a_claim_of_a_dead_process_counts_for_nothing(place: str) -> None:
    make(place)
    child = os.fork()
    if not child:
        arena = Arena.open(place)
        save(arena, 1)
        save(arena, 2)
        os._exit(0 if arena.claim(SnapshotName(step=3, generation=1)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    reader = Arena.open(place)
    assert all(reader.pin(sealed.slot, sealed.seq) for sealed in reader.list_sealed())


def test_touch_keeps_what_is_there(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make(place)
    slot = save(arena, 4)
    assert slot is not None
    arena.populate_pages()
    monkeypatch.setattr("holdfast.checkpoint.arena._POPULATE_WRITE", -1)  # as an old kernel would
    arena.populate_pages()
    assert bytes(arena.slot_image(slot)) == fill(4, IMAGE_BYTES) and steps(arena) == [4]


@contextmanager
def writing(place: str, first: int) -> Iterator[tuple[int, int]]:
    """A process that saves as fast as it can and tells each sealed step; its pid, and where it tells."""
    heard, told = os.pipe()
    child = os.fork()
    if not child:
        arena = Arena.open(place)
        for step in range(first, first + 1_000_000):
            if save(arena, step) is not None:
                os.write(told, struct.pack("<Q", step))
        os._exit(0)
    os.close(told)
    try:
        yield child, heard
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(heard)


@pytest.mark.parametrize(
    ("slots", "kills"),
    [(2, 30), pytest.param(2, 100, marks=pytest.mark.slow), pytest.param(3, 100, marks=pytest.mark.slow)],
)
def test_killed_at_any_moment(place: str, slots: int, kills: int) -> None:
    make(place, slots=slots)
    chance, newest, torn = random.Random(slots), 0, 0
    for _ in range(kills):
        with writing(place, newest + 1) as (child, heard):
            newest = struct.unpack("<Q", os.read(heard, 8))[0]
            time.sleep(chance.random() * 0.003)
            os.kill(child, signal.SIGKILL)
            while news := os.read(heard, 8 << 10):
                newest = struct.unpack_from("<Q", news, len(news) - 8)[0]
        arena = Arena.open(place)
        found = arena.list_sealed()
        assert found and found[0].step >= newest, "a step that was told is there"
        assert found == tuple(sorted(found, key=lambda sealed: -sealed.step))
        for sealed in found:
            assert bytes(arena.slot_image(sealed.slot)) == fill(sealed.step, IMAGE_BYTES)
        torn += len(found) < slots
        newest = found[0].step
    assert torn > 0, "no kill hit a write, so nothing was shown"


def test_read_while_it_is_written(place: str) -> None:
    make(place)
    reader = Arena.open(place)
    pinned = unpinned = 0
    with writing(place, 1) as (_, heard):
        os.read(heard, 8)
        until = time.monotonic() + 20
        while (pinned < 200 or unpinned < 200) and time.monotonic() < until:
            os.read(heard, 64 << 10)  # else the writer would wait for us
            looked = [look(reader, sealed) for sealed in reader.list_sealed()]
            unpinned += sum(whole for whole, _ in looked)
            pinned += sum(held for _, held in looked)
    assert pinned >= 200 and unpinned >= 200


def look(reader: Arena, sealed: SealedSnapshot) -> tuple[bool, bool]:
    """Read a snapshot without and with a pin; whether that came to anything."""
    image = bytes(reader.slot_image(sealed.slot))
    whole = reader.slot_seq(sealed.slot) == sealed.seq  # not overtaken
    assert not whole or image == fill(sealed.step, IMAGE_BYTES)
    held = reader.pin(sealed.slot, sealed.seq)
    if held:
        assert bytes(reader.slot_image(sealed.slot)) == fill(sealed.step, IMAGE_BYTES)
        reader.unpin(sealed.slot)
    return whole, held
