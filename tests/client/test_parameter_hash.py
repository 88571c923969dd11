"""A hash of parameters: every bit counts, it is taken when it is due, and costs no more than its share."""

import mmap
from collections.abc import Iterator

import pytest
import torch

from holdfast.client.training.parameter_hash import ParameterHash
from holdfast.client.training.progress import RankProgress
from holdfast.model.observation import Mark
from holdfast.wire.rank_memory.slot_reader import read_entries, read_slot
from holdfast.wire.rank_memory.slot_writer import SLOT_BYTES, SlotWriter
from tests.client.one_rank_group import one_rank_group


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with one_rank_group():
        yield


TENSORS = [
    torch.randn(7, 3), torch.randn(5).bfloat16(), torch.randn(4, 6).t(), torch.randn(3).double(),
    torch.tensor(1.5), torch.arange(9, dtype=torch.uint8), torch.empty(0),
]  # fmt: skip


@pytest.mark.parametrize("number", range(6))
def test_every_bit_counts(number: int) -> None:
    tensors = [tensor.clone(memory_format=torch.preserve_format) for tensor in TENSORS]
    marking = ParameterHash(tensors, None, 10)
    before = int(marking.compute_hash())
    assert int(marking.compute_hash()) == before
    flat = tensors[number].as_strided((tensors[number].numel(),), (1,)).view(torch.uint8)
    for place in range(flat.numel()):
        for bit in (0, 3, 7):
            flat[place] ^= 1 << bit
            assert int(marking.compute_hash()) != before, (place, bit)
            flat[place] ^= 1 << bit
    assert int(marking.compute_hash()) == before


def test_equal_values_in_another_tensor_are_not_the_same() -> None:
    one, other = torch.ones(4), torch.zeros(4)
    assert int(ParameterHash([one, other], None, 1).compute_hash()) != int(
        ParameterHash([other, one], None, 1).compute_hash()
    )


def test_it_is_taken_when_it_is_due() -> None:
    arena = mmap.mmap(-1, SLOT_BYTES)
    slot = SlotWriter(arena, 0, generation=1, rank=0)
    marking = ParameterHash([torch.ones(4)], None, 4)
    marking._limits = type(marking._limits)(every=4, share=1e9)  # whatever it costs
    for step in range(1, 10):
        marking.on_step(slot, step)
        slot.step(step)
    now = read_slot(arena, 0)
    assert now
    marks = [one for one in read_entries(arena, 0, now, 0)[1] if isinstance(one, Mark)]
    assert [(one.step, one.count) for one in marks] == [(4, 1), (8, 1)]
    assert len({one.value for one in marks}) == 1


def test_what_costs_too_much_is_taken_less_often() -> None:
    marking = ParameterHash([torch.ones(4)], None, 4)
    marking._last = (0, 0.0)
    marking._adjust_stride(4, -1e9)  # it began long ago
    assert marking._stride > 1000


def test_a_script_that_attaches_its_replicas_tells_marks(
    arena: tuple[str, mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SLOT", f"{arena[0]}:2")
    monkeypatch.setenv("HOLDFAST_REPLICA_EVERY", "5")
    progress, net = RankProgress(), torch.nn.Linear(3, 3)
    assert progress.attach(net, replicas=True) is net
    for step in range(1, 12):
        progress.step(step)
    now = read_slot(arena[1], 2)
    assert now
    steps = [one.step for one in read_entries(arena[1], 2, now, 0)[1]]
    assert steps[0] == 5 and all(step % 5 == 0 for step in steps)


def test_without_the_setting_nothing_is_hashed(arena: tuple[str, mmap.mmap], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_SLOT", f"{arena[0]}:2")
    monkeypatch.setenv("HOLDFAST_REPLICA_EVERY", "0")
    progress = RankProgress()
    progress.attach(torch.nn.Linear(3, 3), replicas=True)
    assert progress._marking is None
