"""A state goes into an image and comes back bit for bit, whatever is in it."""

import io
import sys
from typing import Any

import pytest
import torch

from holdfast.checkpoint.image_layout import EXTRA, ImageLayout, arrange_image
from holdfast.checkpoint.memory_copy import MemoryCopier
from holdfast.checkpoint.state_image import (
    FlatState,
    StateError,
    StateImage,
    TensorHolders,
    decode_value,
    encode_value,
    extra_spec,
    flatten_state,
    item_slices,
    record_sizes,
)

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
SHAPES = [(), (1,), (0,), (5,), (3, 0, 2), (2, 3, 4)]


def alone(path: object) -> TensorHolders:
    return TensorHolders((0,), (0,))


def lay(state: dict[str, Any]) -> tuple[ImageLayout, FlatState]:
    found = flatten_state(state, alone)
    return arrange_image([*found.specs, extra_spec(1 << 16, 0, 1)], record_sizes, rank=0, world=1), found


def fill(image: StateImage, things: dict[str, object]) -> None:
    moves = []
    for index, (item, part) in enumerate(zip(image.layout.items, item_slices(image.layout), strict=True)):
        thing = things.get(item.spec.key)
        if isinstance(thing, torch.Tensor):
            moves.append(image.put_tensor(index, thing if part is None else thing[part]))
        elif item.spec.key != EXTRA:
            image.put_value(index, thing)
    MemoryCopier().copy_moves(filter(None, moves))


def saved(state: dict[str, Any]) -> StateImage:
    layout, found = lay(state)
    image = StateImage(layout, memoryview(bytearray(layout.image_bytes)))
    image.write_frames()
    fill(image, found.objects)
    return image


def some(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).nbytes
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().contiguous()
    return bytes(whole.flatten().view(torch.uint8).tolist()) if whole.nbytes else b""


def item_of(image: StateImage, key: str) -> int:
    return next(index for index, item in enumerate(image.layout.items) if item.spec.key == key)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_tensor(dtype: torch.dtype) -> None:
    state = {"t": {str(shape): some(dtype, shape) for shape in SHAPES}}
    image = saved(state)
    for name, tensor in state["t"].items():
        index = item_of(image, f"t.{name}")
        back = torch.empty_like(tensor)
        MemoryCopier().copy_moves(filter(None, [image.get_tensor(index, back)]))
        assert bits(back) == bits(tensor)
        # And torch itself reads the record as its own.
        item = image.layout.items[index]
        loaded = torch.load(io.BytesIO(image.memory[item.offset : item.end]), weights_only=True)
        assert loaded.dtype == dtype and loaded.shape == tensor.shape and bits(loaded) == bits(tensor)


STRIDED = {
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "strided": torch.arange(20)[::3],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    "expanded": torch.tensor([7.0]).expand(4),
    "inside": torch.arange(10.0)[3:7],
}


@pytest.mark.parametrize("how", STRIDED)
def test_however_it_lies_in_memory(how: str) -> None:
    tensor = STRIDED[how]
    image = saved({"t": tensor})
    index = item_of(image, "t")
    back = torch.empty(tensor.shape, dtype=tensor.dtype).t().contiguous().t() if tensor.dim() == 2 else None
    back = torch.empty(tensor.shape, dtype=tensor.dtype) if back is None else back
    MemoryCopier().copy_moves(filter(None, [image.get_tensor(index, back)]))
    assert torch.equal(back, tensor)


def test_names_are_those_of_torch() -> None:
    state = {"model": {"a.weight": torch.ones(2)}, "list": [torch.ones(1), {"x": 3}], "plain": [1, 2], "n": None}
    layout, _ = lay(state)
    found = {item.spec.key: item.spec.path for item in layout.items}
    assert found == {
        "model.a.weight": ("model", "a.weight"),
        "list.0": ("list", 0),
        "list.1.x": ("list", 1, "x"),
        "plain": ("plain",),
        "n": ("n",),
        EXTRA: (EXTRA,),
    }


def test_tied_tensors_lie_there_once() -> None:
    one = torch.randn(1000, 10)
    layout, _ = lay({"model": {"head": one, "embedding": one.detach(), "other": one.clone(), "part": one[:500]}})
    (head,) = (item.spec for item in layout.items if item.spec.key == "model.head")
    assert head.aliases == (("model", "embedding"),)
    assert len(layout.items) == 4


VALUES = [1, -(10**30), 0.1, float("inf"), -0.0, True, None, "text", b"bytes", (1, (2.0, "x")), [1, 2], {3, 4}, 1j]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values(value: object) -> None:
    image = saved({"v": value})
    assert repr(image.get_value(item_of(image, "v"))) == repr(value)


def test_a_value_that_changes() -> None:
    image = saved({"v": 0.5, "w": [1]})
    v, w = item_of(image, "v"), item_of(image, "w")
    for value in (0.25, -0.0, 0.0, 1, 1.0, True, 12345678901234567890):
        image.put_value(v, value)
        assert repr(image.get_value(v)) == repr(value)
    changing = [1]
    image.put_value(w, changing)
    changing.append(2)
    image.put_value(w, changing)
    assert image.get_value(w) == [1, 2], "the same list, and yet another value"
    image.memory[image.layout.items[v].payload] ^= 1  # somebody else wrote here
    image.forget_contents()
    image.put_value(v, 12345678901234567890)
    assert image.get_value(v) == 12345678901234567890


def test_what_outgrows_its_room() -> None:
    image = saved({"v": "x"})
    with pytest.raises(StateError, match=r"^v .*\b320 bytes"):
        image.put_value(item_of(image, "v"), "x" * 1000)


class Strange:
    pass


def test_what_cannot_be_saved() -> None:
    with pytest.raises(StateError, match=r"^x\.y is a Strange\b"):
        lay({"x": {"y": Strange()}})
    with pytest.raises(StateError, match=r"^x is a function\b"):
        lay({"x": lambda: 1})
    with pytest.raises(StateError, match=r"^x .*\bsparse"):
        lay({"x": torch.eye(3).to_sparse()})


def test_nothing_strange_is_made_of_bytes() -> None:
    import collections

    for thing in (Strange(), collections.deque([1]), sys.exit):
        with pytest.raises(Exception, match="weights_only") as refused:
            decode_value(encode_value(thing))
        assert refused.type.__name__ == "UnpicklingError"


def test_numpy() -> None:
    import numpy

    for thing in (numpy.arange(5), numpy.float32(1.5), numpy.array([[True]]), {"k": numpy.int64(3)}):
        assert repr(decode_value(encode_value(thing))) == repr(thing)


def test_a_copier() -> None:
    sizes = [0, 1, 4 << 20, (4 << 20) + 1, 11 << 20]
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    for threads in (1, 3):
        targets = [torch.zeros_like(source) for source in sources]
        copier = MemoryCopier(threads)
        for _ in range(3):
            copier.copy_moves([(t.data_ptr(), s.data_ptr(), s.nbytes) for t, s in zip(targets, sources, strict=True)])
            assert all(torch.equal(t, s) for t, s in zip(targets, sources, strict=True))
            for target in targets:
                target.zero_()
