"""Losses on a GPU: reported late, under their own step, and never waited for."""

import mmap

import pytest
import torch

from holdfast.client.training.gpu_losses import LossFetches
from holdfast.wire.rank_memory.slot_reader import read_slot
from holdfast.wire.rank_memory.slot_writer import SLOT_BYTES, SlotWriter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def test_values_arrive_later_under_their_own_step() -> None:
    memory = mmap.mmap(-1, SLOT_BYTES)
    slot = SlotWriter(memory, 0, generation=1, rank=0)
    copies = LossFetches()
    big = torch.randn(8192, 8192, device="cuda")
    nan = torch.tensor([float("nan")], device="cuda", dtype=torch.bfloat16)
    work = big @ big
    copies.start_fetch(4, work[0, 0] * 0 + 2.5, nan)  # the first of each kind makes its buffers, which takes the device
    torch.cuda.synchronize()
    copies.collect_arrived(SlotWriter(mmap.mmap(-1, SLOT_BYTES), 0, generation=1, rank=0))
    for _ in range(60):
        torch.mm(big, big, out=work)
    copies.start_fetch(5, work[0, 0] * 0 + 2.5, nan)
    copies.collect_arrived(slot)
    slot.step(6)
    now = read_slot(memory, 0)
    assert now and now.loss is None, "it waited"
    torch.cuda.synchronize()
    copies.collect_arrived(slot)
    slot.step(7)
    now = read_slot(memory, 0)
    assert now and (now.step, now.loss_step, now.loss, now.first_bad_step) == (7, 5, 2.5, -1)


def test_a_script_far_ahead_loses_values() -> None:
    slot = SlotWriter(mmap.mmap(-1, SLOT_BYTES), 0, generation=1, rank=0)
    copies = LossFetches()
    for step in range(100):
        copies.start_fetch(step, torch.ones((), device="cuda"), 1.0)
    torch.cuda.synchronize()
    copies.collect_arrived(slot)
    copies.start_fetch(100, torch.ones((), device="cuda"), None)
