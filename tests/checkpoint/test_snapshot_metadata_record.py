"""Every image says what it is, to those who know nothing else of it."""

import pytest
import torch

from holdfast.checkpoint.image_layout import EXTRA, arrange_image
from holdfast.checkpoint.snapshot_metadata_record import (
    GeneratorStates,
    ImageMetadata,
    ImageMetadataError,
    find_metadata,
    pack_metadata,
    unpack_metadata,
)
from holdfast.checkpoint.state_image import StateImage, TensorHolders, extra_spec, flatten_state, record_sizes

TOLD = ImageMetadata(step=7, absent=["a.b"], generators=GeneratorStates((3, b"x", None), b"y"), extra=b"z", layout=b"l")


def test_it_comes_back() -> None:
    assert unpack_metadata(memoryview(pack_metadata(TOLD) + bytes(100))) == TOLD


@pytest.mark.parametrize(
    "content", [b"", b"HFTOLD01", pack_metadata(TOLD)[:-1], b"X" + pack_metadata(TOLD)[1:], bytes(5000)]
)
def test_what_says_nothing(content: bytes) -> None:
    with pytest.raises(ImageMetadataError):
        unpack_metadata(memoryview(content))


def test_it_is_found_in_an_image() -> None:
    state = {"x": torch.ones(1000, 1000), "y": torch.ones(3), "v": 1}
    specs = flatten_state(state, lambda _: TensorHolders((0,), (0,))).specs
    for size in (1 << 12, 1 << 20, 5 << 20):
        layout = arrange_image([*specs, extra_spec(size, 0, 1)], record_sizes, rank=0, world=1)
        image = StateImage(layout, memoryview(bytearray(layout.image_bytes)))
        image.write_frames()
        with pytest.raises(ImageMetadataError):
            find_metadata(image.memory)
        assert layout.items[0].spec.key == EXTRA
        image.put_bytes(0, pack_metadata(TOLD))
        assert find_metadata(image.memory) == TOLD
