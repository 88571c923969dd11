"""Slots: what is written is read, whole or not at all, whatever becomes of the writer."""

import math
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.model.observation import Mark, StepValues
from holdfast.wire.rank_memory.slot_reader import clear_slot, read_entries, read_slot
from holdfast.wire.rank_memory.slot_writer import ENTRY_BYTES, RING_AT, SLOT_BYTES, SlotWriter, open_slot_memory

ROOT = Path(__file__).parents[2]

# Writes as fast as it can; every field follows from the step, so a reader can tell a torn record.
HAMMER = """
import sys
from holdfast.wire.rank_memory.slot_writer import SlotWriter
slot = SlotWriter.open(sys.argv[1], 1, generation=7, rank=3)
step = 0
print("on", flush=True)
while True:
    slot.write_values(step, step * 2.0, -float(step))
    slot.step(step)
    if step % 64 == 0:
        slot.enter_phase(str(step))
    step += 1
"""


@pytest.fixture
def arena() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, 3 * SLOT_BYTES) as memory:
        yield memory


def test_an_empty_slot_says_nothing(arena: mmap.mmap) -> None:
    assert read_slot(arena, 1) is None


def test_what_is_told_is_read(arena: mmap.mmap) -> None:
    slot = SlotWriter(arena, 1, generation=4, rank=9)
    start = read_slot(arena, 1)
    assert start and (start.generation, start.rank, start.pid) == (4, 9, os.getpid())
    assert (start.step, start.first_step, start.loss, start.grad_norm, start.phase) == (-1, -1, None, None, "")
    slot.write_values(10, 0.5, None)
    slot.step(10)
    slot.enter_phase("eval")
    slot.write_values(11, None, 2.0)
    slot.step(11)
    now = read_slot(arena, 1)
    assert now and (now.step, now.counted, now.first_step, now.phase) == (11, False, 10, "eval")
    assert (now.loss, now.grad_norm, now.loss_step, now.first_bad_step) == (None, 2.0, 11, -1)
    assert start.at <= now.first_at <= now.phase_at <= now.at <= time.monotonic()
    assert read_slot(arena, 0) is None and read_slot(arena, 2) is None


@pytest.mark.parametrize(
    ("phase", "read"),
    [("up hf_AbCdEfGhIjKlMnOpQrStUvWx", "up ..."), ("a-phase-of-one-long-word-x", "a-phase-of-one-long-word")],
)
def test_a_phase_that_was_cut_loses_its_last_word(arena: mmap.mmap, phase: str, read: str) -> None:
    """Nobody could tell that a part of a word is a secret."""
    SlotWriter(arena, 1, generation=4, rank=9).enter_phase(phase)
    now = read_slot(arena, 1)
    assert now and now.phase == read


def test_when_it_had_its_group_and_its_state_is_told(arena: mmap.mmap) -> None:
    slot = SlotWriter(arena, 1, generation=4, rank=9)
    start = read_slot(arena, 1)
    assert start and (start.grouped_at, start.restored_at, start.step) == (0.0, 0.0, -1)
    slot.mark_grouped()
    grouped = read_slot(arena, 1)
    assert grouped and start.at <= grouped.grouped_at <= time.monotonic() and grouped.restored_at == 0.0
    assert grouped.restored == -1
    slot.mark_restored(0.0, 2)
    slot.mark_grouped()
    slot.step(3)
    now = read_slot(arena, 1)
    assert now and now.restored == 2
    assert now.grouped_at == grouped.grouped_at, "a second group is none that training waited for"
    assert now.grouped_at <= now.restored_at <= now.first_at and now.step == 3


def test_what_is_left_out_is_told_with_the_next_step(arena: mmap.mmap) -> None:
    slot = SlotWriter(arena, 1, generation=4, rank=9)
    slot.step(1)
    slot.mark_skippable()
    slot.note_skip(3, 2, 32)
    now = read_slot(arena, 1)
    assert now and (now.step, now.skippable, now.skipped) == (1, True, 0)
    slot.write_values(4, 1.0, 2.0)
    slot.step(4)
    now = read_slot(arena, 1)
    assert now and (now.step, now.skippable, now.skipped, now.skipped_samples) == (4, True, 2, 32)
    assert (now.loss, now.grad_norm, now.counted, now.first_step) == (1.0, 2.0, False, 1)


def test_a_generation_may_begin_with_steps_that_are_left_out(arena: mmap.mmap) -> None:
    slot = SlotWriter(arena, 1, generation=4, rank=9)
    slot.note_skip(30, 1, 0)
    slot.note_skip(31, 2, 0)
    slot.remember_first_step(1, numbered=True)  # the optimizer hook has seen a step
    slot.step(32)
    slot.note_skip(33, 3, 0)
    slot.step(34)
    now = read_slot(arena, 1)
    assert now and (now.first_step, now.step, now.counted) == (30, 34, False), "it went on from step 29"
    assert now.first_at < now.at


def test_imports_belong_to_the_groups_unless_the_state_was_restored_before(arena: mmap.mmap) -> None:
    slot = SlotWriter(arena, 0, generation=1, rank=0)
    slot.mark_grouped()
    slot.note_set_up(later := time.monotonic() + 5.0, later + 1.0)
    slot.remember_first_step(1, numbered=True)
    now = read_slot(arena, 0)
    assert now and (now.grouped_at, now.set_up_at) == (later, later + 1.0)
    restored = SlotWriter(arena, 1, generation=1, rank=1)
    restored.mark_grouped()
    restored.mark_restored(0.0)
    restored.note_set_up(later, later)
    restored.step(1)
    now = read_slot(arena, 1)
    assert now and now.grouped_at < now.restored_at < now.set_up_at == later
    heir = SlotWriter(arena, 1, generation=1, rank=1, heir=True)
    heir.step(2)
    now = read_slot(arena, 1)
    assert now and now.set_up_at == later


def test_a_single_loss_that_is_not_finite_does_not_date_those_that_last(arena: mmap.mmap) -> None:
    slot = SlotWriter(arena, 0, generation=1, rank=0)
    seen = []
    for step, loss in enumerate([1.0, math.nan, 1.0, math.inf, math.nan, 1.0]):
        slot.write_values(step, loss, math.inf)  # loss scaling makes such norms
        slot.step(step)
        now = read_slot(arena, 0)
        assert now is not None
        seen.append((now.first_bad_step, now.lasting_bad_step))
    assert seen == [(-1, -1), (1, -1), (1, -1), (1, -1), (1, 3), (1, 3)]


def test_one_step_that_is_told_twice_is_one_bad_step(arena: mmap.mmap) -> None:
    slot = SlotWriter(arena, 0, generation=1, rank=0)
    for _ in range(2):
        slot.write_values(5, math.nan, None)
    slot.step(5)
    heir = SlotWriter(arena, 0, generation=1, rank=0, heir=True)
    before = read_slot(arena, 0)
    heir.write_values(6, math.nan, None)
    heir.step(6)
    after = read_slot(arena, 0)
    assert before and after and (before.lasting_bad_step, after.lasting_bad_step) == (-1, 5)


def test_the_first_bad_step_and_the_first_failure_stay(arena: mmap.mmap) -> None:
    slot = SlotWriter(arena, 0, generation=1, rank=0)
    for step, loss in enumerate([1.0, math.inf, math.nan, 1.0]):
        slot.write_values(step, loss, 1.0)
        slot.step(step, counted=True)
    slot.write_failure("ValueError: " + "é" * 200)
    slot.write_failure("RuntimeError: an echo")
    now = read_slot(arena, 0)
    assert now and (now.first_bad_step, now.loss, now.counted, now.failed) == (1, 1.0, True, True)
    assert now.failure == "ValueError: " + "é" * 54 + " ..."


def test_a_nan_is_not_an_absence(arena: mmap.mmap) -> None:
    slot = SlotWriter(arena, 0, generation=1, rank=0)
    slot.write_values(5, math.nan, None)
    slot.step(5)
    now = read_slot(arena, 0)
    assert now and now.loss is not None and math.isnan(now.loss) and now.grad_norm is None


def test_numbers_that_no_rank_reports_are_no_record(arena: mmap.mmap) -> None:
    slot = SlotWriter(arena, 0, generation=1, rank=0)
    slot.add_work(math.inf, 1.0)
    slot.step(5)
    now = read_slot(arena, 0)
    assert now and (now.step, now.tokens, now.flops) == (5, 0.0, 1.0)
    slot.write_values((1 << 53) + 1, 1.0, None)
    slot.show_values()
    assert read_slot(arena, 0) is None and read_entries(arena, 0, now, 0) == (0, [])
    slot.write_values(6, 1.0, None)
    slot.step((1 << 53) + 1)
    assert read_slot(arena, 0) is None, "a beat with it would be refused by the controller"


def test_cleared_and_reused(arena: mmap.mmap) -> None:
    SlotWriter(arena, 1, generation=1, rank=0).step(5)
    SlotWriter(arena, 2, generation=1, rank=1).step(5)
    clear_slot(arena, 1)
    assert read_slot(arena, 1) is None and read_slot(arena, 2)
    again = SlotWriter(arena, 2, generation=2, rank=1)  # not cleared: the newer writer counts all the same
    now = read_slot(arena, 2)
    assert now and (now.generation, now.step) == (2, -1)
    again.step(0)
    now = read_slot(arena, 2)
    assert now and now.step == 0


@pytest.mark.parametrize("damaged", range(0, SLOT_BYTES, 37))
def test_a_damaged_record_is_not_taken(arena: mmap.mmap, damaged: int) -> None:
    slot = SlotWriter(arena, 0, generation=1, rank=0)
    for step in range(4):
        slot.step(step)
    before = read_slot(arena, 0)
    arena[damaged] ^= 0x40
    after = read_slot(arena, 0)
    assert before and after and after.step in (before.step, before.step - 1)


def check_until(until: float, memory: mmap.mmap, pid: int) -> None:
    """Read and check until then, and until enough different steps were seen, however busy the machine is."""
    last, seen = -1, 0
    while time.monotonic() < until or seen <= 100:
        now = read_slot(memory, 1)
        assert now and (now.generation, now.rank, now.pid) == (7, 3, pid)
        assert now.step >= last
        if now.step >= 0:
            assert (now.loss, now.grad_norm, now.loss_step) == (now.step * 2.0, -now.step, now.step)
            assert now.first_step == 0 and int(now.phase or 0) in (now.step // 64 * 64, max(now.step - 64, 0))
        seen += now.step > last
        last = now.step


def test_torn_reads_are_never_taken() -> None:
    fd = os.memfd_create("slots")
    os.ftruncate(fd, 2 * SLOT_BYTES)
    path = f"/proc/{os.getpid()}/fd/{fd}"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HAMMER, path]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as writer, open_slot_memory(path) as memory:
        try:
            assert writer.stdout and writer.stdout.readline()
            check_until(time.monotonic() + 0.5, memory, writer.pid)
            writer.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
            stopped = [read_slot(memory, 1) for _ in range(3)]
            assert stopped[0] and stopped[0] == stopped[2]  # readable while the rank stands still
        finally:
            writer.kill()
    os.close(fd)


def news(arena: mmap.mmap, after: int = 0) -> tuple[int, list[StepValues | Mark]]:
    now = read_slot(arena, 1)
    assert now
    return read_entries(arena, 1, now, after)


def test_the_values_of_every_step_are_told_once(arena: mmap.mmap) -> None:
    slot = SlotWriter(arena, 1, generation=3, rank=5)
    assert news(arena) == (0, [])
    slot.write_values(1, 2.5, None)
    slot.write_values(2, None, 0.5, 1.5, 1e-3)
    slot.write_hash(2, 2**64 - 1, 255, 4)
    slot.step(2)
    count, found = news(arena)
    first, second, mark = found
    assert isinstance(first, StepValues) and (first.step, first.loss, first.grad_norm, first.update) == (
        1,
        2.5,
        None,
        None,
    )
    assert isinstance(second, StepValues) and (second.loss, second.grad_norm, second.own_norm) == (None, 0.5, 1.5)
    assert (second.update, second.rank, second.generation) == (1e-3, 5, 3)
    assert mark == Mark(5, 2, "ff", 4, "parameters", 2**64 - 1)
    assert news(arena, count) == (count, [])


def test_who_looks_too_seldom_misses_the_oldest(arena: mmap.mmap) -> None:
    slot = SlotWriter(arena, 1, generation=3, rank=5)
    for step in range(100):
        slot.write_values(step, float(step), None)
    count, found = news(arena)
    assert count == 100 and [one.step for one in found] == list(range(84, 100))


def test_a_damaged_entry_and_one_of_another_generation_are_left_out(arena: mmap.mmap) -> None:
    old, slot = SlotWriter(arena, 1, generation=2, rank=5), SlotWriter(arena, 1, generation=3, rank=5)
    for step in range(4):
        slot.write_values(step, float(step), None)
    arena[SLOT_BYTES + RING_AT + 2 * ENTRY_BYTES + 30] ^= 4
    old._told = 9
    old.write_values(7, 1.0, None)
    assert [one.step for one in news(arena)[1]] == [0, 2, 3]
