"""Halves of shares, how they lie over one another, and the XOR itself."""

import os

import pytest

from holdfast.checkpoint import parity_image
from holdfast.checkpoint.arena_header import PAGE_BYTES
from holdfast.checkpoint.parity_image import half_of, make_parity_layout, xor_into
from tests.agent.peers import layout

SHARES = (
    ((0, PAGE_BYTES),),
    ((0, 10 * PAGE_BYTES),),
    ((PAGE_BYTES, 4 * PAGE_BYTES), (10 * PAGE_BYTES, 12 * PAGE_BYTES)),
    ((0, PAGE_BYTES), (5 * PAGE_BYTES, 6 * PAGE_BYTES), (9 * PAGE_BYTES, 30 * PAGE_BYTES)),
    (),
)


@pytest.mark.parametrize("share", SHARES)
def test_two_halves_are_the_whole(share: tuple[tuple[int, int], ...]) -> None:
    one, two = half_of(share, 0), half_of(share, 1)
    pages = [page for start, end in share for page in range(start, end, PAGE_BYTES)]
    assert [page for start, end in (*one, *two) for page in range(start, end, PAGE_BYTES)] == pages
    sizes = [sum(end - start for start, end in half) for half in (one, two)]
    assert 0 <= sizes[0] - sizes[1] <= PAGE_BYTES


def test_what_a_stretch_was_laid_over() -> None:
    shape = make_parity_layout(layout(0, 3, False), layout(1, 3, True))
    for half in (0, 1):
        cuts = shape.other_cuts(half, 0, shape.bytes)
        assert sum(end - start for start, end in cuts) == shape.starts[1 - half][-1]
        assert cuts[0][0] == shape.chunks[1 - half][0][0]
    assert shape.other_cuts(0, shape.starts[1][-1], shape.bytes) == [], "the other one is shorter"
    low, high = shape.chunks[1][0]
    assert shape.other_cuts(0, 100, 200) == [(low + 100, low + 200)] and high > low + 200


@pytest.mark.parametrize("length", [0, 1, 65536, 200_001])
@pytest.mark.parametrize("numpy", [True, False])
def test_xor(length: int, numpy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not numpy:
        monkeypatch.setattr(parity_image, "_import_numpy", lambda: None)
    one, two = bytearray(os.urandom(length)), os.urandom(length)
    expected = bytes(a ^ b for a, b in zip(one, two, strict=True))
    xor_into(memoryview(one), memoryview(two))
    assert bytes(one) == expected
