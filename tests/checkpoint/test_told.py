"""Every image says what it is, to those who know nothing else of it."""

import pytest
import torch

from holdfast.checkpoint.layout import EXTRA, arrange
from holdfast.checkpoint.state import Held, Image, extra_spec, look, sizes
from holdfast.checkpoint.told import Generators, Told, ToldError, found, packed, unpacked

TOLD = Told(step=7, absent=["a.b"], generators=Generators((3, b"x", None), b"y"), extra=b"z", layout=b"l")


def test_it_comes_back() -> None:
    assert unpacked(memoryview(packed(TOLD) + bytes(100))) == TOLD


@pytest.mark.parametrize("content", [b"", b"HFTOLD01", packed(TOLD)[:-1], b"X" + packed(TOLD)[1:], bytes(5000)])
def test_what_says_nothing(content: bytes) -> None:
    with pytest.raises(ToldError):
        unpacked(memoryview(content))


def test_it_is_found_in_an_image() -> None:
    state = {"x": torch.ones(1000, 1000), "y": torch.ones(3), "v": 1}
    specs = look(state, lambda _: Held((0,), (0,))).specs
    for size in (1 << 12, 1 << 20, 5 << 20):
        layout = arrange([*specs, extra_spec(size, 0, 1)], sizes, rank=0, world=1)
        image = Image(layout, memoryview(bytearray(layout.image_bytes)))
        image.stamp()
        with pytest.raises(ToldError):
            found(image.memory)
        assert layout.items[0].spec.key == EXTRA
        image.put_bytes(0, packed(TOLD))
        assert found(image.memory) == TOLD
