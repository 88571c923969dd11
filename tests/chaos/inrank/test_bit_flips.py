"""The bits that were asked for are flipped, and no others."""

import random

import pytest
import torch

from holdfast.chaos.inrank.bit_flips import can_flip, choose_bit, flip_bits

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [torch.int32, torch.int64, torch.int16, torch.int16]
WORDS = dict(zip(DTYPES, INTS, strict=True))


def differing(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    """For every element how many of its bits differ."""
    words = (a.view(WORDS[a.dtype]) ^ b.view(WORDS[b.dtype])).tolist()
    width = 8 * a.element_size()
    return [bin(word & ((1 << width) - 1)).count("1") for word in words]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["sign", "exponent", "mantissa", "any"])
def test_one_bit_of_one_element(dtype: torch.dtype, kind: str) -> None:
    tensor = torch.linspace(0.5, 1.5, 50).to(dtype)
    before = tensor.clone()
    said = flip_bits([tensor], kind, 1, random.Random(1))
    assert sum(differing(tensor, before)) == 1 and "bit " in said
    if kind == "sign":
        assert (tensor < 0).sum() == 1
    if kind == "mantissa":
        [at] = (tensor != before).nonzero().flatten().tolist()
        assert 0.5 < float(tensor[at] / before[at]) < 2


def test_many_bits_and_nan() -> None:
    tensor = torch.ones(10_000)
    flip_bits([tensor], "any", 8, random.Random(2))
    assert sum(differing(tensor, torch.ones(10_000))) == 8
    flip_bits([tensor], "nan", 1, random.Random(2))
    assert tensor.isnan().sum() >= 1


def test_large_tensors_are_struck_more_often() -> None:
    struck = 0
    for seed in range(100):
        small, large = torch.ones(10), torch.ones(90)
        flip_bits([small, large], "sign", 1, random.Random(seed))
        struck += int((large < 0).any())
    assert 75 < struck < 100


def test_what_is_not_contiguous_is_struck_too() -> None:
    tensor = torch.ones(4, 6).t()
    flip_bits([tensor], "sign", 1, random.Random(3))
    assert (tensor < 0).sum() == 1


def test_autograd_does_not_see_it() -> None:
    x = torch.ones(3, requires_grad=True)
    y = torch.tanh(x)
    flip_bits([y], "mantissa", 1, random.Random(1))
    y.sum().backward()
    assert x.grad is not None


def test_what_cannot_be_struck() -> None:
    assert not can_flip(torch.ones(3, dtype=torch.int64)) and not can_flip(torch.empty(0)) and not can_flip("text")
    assert flip_bits([torch.ones(3, dtype=torch.int64)], "any", 1, random.Random(1)) == ""


def test_bits_lie_where_they_should() -> None:
    dice = random.Random(5)
    assert {choose_bit("mantissa", torch.float32, dice) for _ in range(500)} == set(range(23))
    assert {choose_bit("exponent", torch.bfloat16, dice) for _ in range(200)} == set(range(7, 15))
    assert choose_bit("sign", torch.float64, dice) == 63
