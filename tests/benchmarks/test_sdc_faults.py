"""The injector of bit flips: it flips what it says, nothing else, and everywhere."""

from collections import Counter

import torch

from benchmarks._sdc_faults import BITS, PLACES, faults, flip, pick


def test_every_place_meets_every_kind_of_bits() -> None:
    made = faults(160, 4, 10, 4)
    assert Counter((fault.place, fault.bits) for fault in made) == dict.fromkeys(
        ((place, bits) for place in PLACES for bits in BITS), 10
    )
    assert {fault.rank for fault in made} == {0, 1, 2, 3} and {fault.offset for fault in made} == set(range(1, 11))
    assert made == faults(160, 4, 10, 4) and made[:40] == faults(40, 4, 10, 4), "every rank draws the same"


def test_exactly_these_bits_are_flipped() -> None:
    tensor = torch.ones(4, 5)
    flip(tensor, ((0.5, 31),))
    assert tensor.view(-1)[10] == -1.0 and int((tensor != 1).sum()) == 1
    flip(tensor, ((0.5, 31), (0.0, 23), (0.99, 0)))
    assert tensor.view(-1)[10] == 1.0 and tensor[0, 0] == 0.5
    assert tensor[3, 4] == 1.0 + 2**-23


def test_large_tensors_are_struck_more_often() -> None:
    tensors = [torch.zeros(1), torch.zeros(98), torch.zeros(1)]
    struck = Counter(len(pick(tensors, part / 100)) for part in range(100))
    assert struck == {98: 98, 1: 2} and pick(tensors, 1.0) is tensors[-1]
