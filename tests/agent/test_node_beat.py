"""One beat for the ranks of a node."""

import mmap
import time
from math import isnan

import pytest

from holdfast.agent.rank.node_beat import make_beat, show_first_step
from holdfast.wire.rank_memory.slot_reader import SlotReading, read_slot
from holdfast.wire.rank_memory.slot_writer import SLOT_BYTES, SlotWriter


class Node:
    def __init__(self) -> None:
        self.arena = mmap.mmap(-1, 2 * SLOT_BYTES)
        self.slots = [SlotWriter(self.arena, index, generation=3, rank=4 + index) for index in range(2)]

    def readings(self) -> list[SlotReading]:
        found = [read_slot(self.arena, index) for index in range(2)]
        return [reading for reading in found if reading is not None]


def test_the_slowest_rank_speaks_for_the_node() -> None:
    node = Node()
    for slot, step in zip(node.slots, (6, 5), strict=True):
        slot.write_values(step, float(step), None)
        slot.step(step)
    beat = make_beat("n1", node.readings(), 1000.0)
    assert (beat.node, beat.generation, beat.step, beat.loss, beat.first_step) == ("n1", 3, 5, 5.0, 5)
    assert not beat.counted and 1000.0 < beat.at <= time.monotonic() + 1000.0
    assert (beat.grouped_at, beat.restored_at, beat.skippable, beat.skipped) == (0.0, 0.0, False, 0)


def test_the_loss_of_any_rank_comes_with_its_own_step() -> None:
    """What a script logs for a step comes after the step is counted, and often from one rank alone."""
    node = Node()
    node.slots[0].write_values(4, 0.4, None)
    for slot, step in zip(node.slots, (5, 5), strict=True):
        slot.step(step)
    beat = make_beat("n1", node.readings(), 0.0)
    assert (beat.step, beat.loss, beat.loss_step) == (5, 0.4, 4)
    node.slots[1].write_values(5, 0.5, None)
    node.slots[1].step(6)
    beat = make_beat("n1", node.readings(), 0.0)
    assert (beat.step, beat.loss, beat.loss_step) == (5, 0.5, 5)
    node.slots[0].write_values(5, float("nan"), None)
    node.slots[0].step(6)
    bad = make_beat("n1", node.readings(), 0.0).loss
    assert bad is not None and isnan(bad), "of losses of one step, what is wrong is not hidden"


def test_a_loss_whose_step_is_counted_otherwise_has_none() -> None:
    node = Node()
    node.slots[0].write_values(3, 0.3, None)
    node.slots[0].step(3)
    node.slots[1].step(2, counted=True)
    beat = make_beat("n1", node.readings(), 0.0)
    assert (beat.counted, beat.loss, beat.loss_step) == (True, 0.3, -1)


def test_groups_and_states_are_there_when_the_last_rank_has_them() -> None:
    node = Node()
    node.slots[0].mark_grouped()
    node.slots[1].mark_grouped()
    node.slots[1].mark_restored(0.5)
    for slot in node.slots:
        slot.step(1)
    readings = node.readings()
    beat = make_beat("n1", readings, 1000.0)
    assert beat.grouped_at == readings[1].grouped_at + 1000.0
    assert beat.restored_at == readings[1].restored_at + 1000.0
    assert beat.restored_at - beat.restoring_at == pytest.approx(0.5, abs=1e-6)


def test_batches_can_be_left_out_when_every_rank_asks() -> None:
    node = Node()
    node.slots[0].mark_skippable()
    for slot, samples in zip(node.slots, (16, 15), strict=True):
        slot.note_skip(1, 2, samples)
    for slot in node.slots:
        slot.step(3)
    beat = make_beat("n1", node.readings(), 0.0)
    assert (beat.step, beat.first_step) == (3, 1)
    assert (beat.skippable, beat.skipped, beat.skipped_samples) == (False, 2, 31)
    node.slots[1].mark_skippable()
    assert make_beat("n1", node.readings(), 0.0).skippable


def test_a_first_step_that_was_counted_is_told_once_the_rank_is_over() -> None:
    """A script that fails between its optimizer's step and holdfast.step, such as in a save, has made that step."""
    arena = mmap.mmap(-1, 2 * SLOT_BYTES)

    def read(slot: SlotWriter, index: int, *, ended: bool = False) -> tuple[int, bool]:
        found = read_slot(arena, index)
        assert found is not None
        shown = show_first_step(found, ended=ended)
        return shown.step, shown.at == shown.first_at

    first, later = (SlotWriter(arena, index, generation=2, rank=0) for index in range(2))
    for slot in (first, later):
        slot.resume_from(0)
        slot.remember_first_step(1, numbered=slot is first)
    assert read(first, 0)[0] == -1, "the script may be about to report its own number"
    assert read(first, 0, ended=True) == (1, True)
    for slot in (first, later):
        slot.write_failure("ValueError: cannot save")
    assert read(first, 0) == (1, True)
    assert read(later, 1, ended=True)[0] == -1, "steps before it may have had the script's numbers"
    first.step(7)
    assert read(first, 0, ended=True)[0] == 7
