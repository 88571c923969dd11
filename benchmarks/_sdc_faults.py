"""Bit flips with their ground truth: what is struck, on which rank, at which step, which bits."""

import random

import msgspec
import torch

PLACES = ("parameters", "optimizer", "gradient after", "gradient before")  # the last two: the sum over replicas
BITS = ("sign", "exponent", "mantissa", "several")
_RANGE = {"sign": (31, 31), "exponent": (23, 30), "mantissa": (0, 22), "several": (0, 31)}
_SEVERAL = 8  # elements


class Fault(msgspec.Struct, frozen=True):
    number: int
    place: str
    bits: str
    rank: int
    offset: int  # steps after the start of its trial
    tensor: float  # which tensor, as a part of all elements; drawn here, so that every rank draws the same
    flips: tuple[tuple[float, int], ...]  # which element, as a part of them, and which bit
    stream: int  # of batches


def faults(count: int, ranks: int, latest: int, streams: int) -> list[Fault]:
    """Every place with every kind of bits, again and again, the rest by chance."""
    dice = random.Random(20260)
    made = []
    for number in range(count):
        place, bits = PLACES[number % 4], BITS[number // 4 % 4]
        low, high = _RANGE[bits]
        flips = [(dice.random(), dice.randint(low, high)) for _ in range(_SEVERAL if bits == "several" else 1)]
        where = (dice.randrange(ranks), dice.randrange(1, latest + 1), dice.random(), tuple(flips))
        made.append(Fault(number, place, bits, *where, dice.randrange(streams)))
    return made


def pick(tensors: list[torch.Tensor], part: float) -> torch.Tensor:
    """Every element is struck with the same chance, so large tensors more often."""
    place = int(part * sum(tensor.numel() for tensor in tensors))
    for tensor in tensors:
        if place < tensor.numel():
            return tensor
        place -= tensor.numel()
    return tensors[-1]


def flip(tensor: torch.Tensor, flips: tuple[tuple[float, int], ...]) -> None:
    """Flip these bits of a contiguous tensor of 32-bit floats, in place."""
    words = tensor.detach().view(-1).view(torch.int32)
    for part, bit in flips:
        mask = 1 << bit
        words[int(part * words.numel())] ^= mask - (1 << 32) if bit == 31 else mask
