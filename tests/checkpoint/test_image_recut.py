"""States that some ranks saved are cut anew for more or fewer of them, bit for bit, by the layouts of their images."""

from collections.abc import Callable
from math import prod
from typing import Any

import msgspec
import pytest
import torch

from holdfast.checkpoint.image_layout import EXTRA, ImageItem, ImageLayout, RecordSpec, arrange_image
from holdfast.checkpoint.image_recut import (
    ImageRecut,
    RecutError,
    RecutPiece,
    covering_range,
    differing_piece,
    find_cut_span,
    is_run,
    place_extra,
    place_piece,
    place_value,
)
from holdfast.checkpoint.state_image import StateImage, encode_value, extra_spec, record_sizes

State = dict[str, Any]
Part = tuple[tuple[slice, ...], tuple[int, ...], tuple[int, ...]]  # of a tensor: slices, the group, who has this part
Place = Callable[[str, tuple[int, ...], int], Part]


def edges(size: int, parts: int, part: int) -> slice:
    """As torch cuts a dimension: equal parts, the last ones smaller or empty."""
    rows = -(-size // parts)
    return slice(min(size, rows * part), min(size, rows * (part + 1)))


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def rows_of(world: int) -> Place:
    """FSDP: the first dimension is divided among all; what has none is everybody's."""
    everyone = tuple(range(world))

    def place(key: str, shape: tuple[int, ...], rank: int) -> Part:
        if not shape:
            return (), everyone, everyone
        return (edges(shape[0], world, rank), *whole(shape)[1:]), everyone, (rank,)

    return place


def columns_and_rows(rows: int, columns: int) -> Place:
    """Ranks as a mesh: tensors of two dimensions are divided in both, others by rows, and held by each column."""
    everyone = tuple(range(rows * columns))

    def place(key: str, shape: tuple[int, ...], rank: int) -> Part:
        row, column = divmod(rank, columns)
        if not shape:
            return (), everyone, everyone
        first = edges(shape[0], rows, row)
        if len(shape) == 1:
            return (first,), everyone, tuple(range(row * columns, (row + 1) * columns))
        return (first, edges(shape[1], columns, column), *whole(shape)[2:]), everyone, (rank,)

    return place


def replicas_of(shards: int, copies: int) -> Place:
    """HSDP: rows are divided among shards, and every shard is held by as many replicas."""
    everyone = tuple(range(shards * copies))

    def place(key: str, shape: tuple[int, ...], rank: int) -> Part:
        if not shape:
            return (), everyone, everyone
        shard = rank % shards
        return (edges(shape[0], shards, shard), *whole(shape)[1:]), everyone, everyone[shard::shards]

    return place


def lay_out(state: State, place: Place, rank: int, world: int) -> ImageLayout:
    specs = [extra_spec(4096, rank, world)]
    for key, thing in state.items():
        if not isinstance(thing, torch.Tensor):
            group = tuple(range(world))
            room = 2 * len(encode_value(thing))
            specs.append(RecordSpec(key=key, path=(key,), bytes=room, group=group, replicas=group, alike=False))
            continue
        cut, group, replicas = place(key, tuple(thing.shape), rank)
        shape = tuple(one.stop - one.start for one in cut)
        specs.append(
            RecordSpec(
                key=key,
                path=(key,),
                bytes=prod(shape) * thing.itemsize,
                dtype=str(thing.dtype).removeprefix("torch."),
                shape=shape,
                whole=tuple(thing.shape),
                start=tuple(one.start for one in cut),
                group=group,
                replicas=replicas,
            )
        )
    return arrange_image(specs, record_sizes, rank=rank, world=world)


def fill(state: State, layout: ImageLayout) -> StateImage:
    image = StateImage(layout, memoryview(bytearray(layout.image_bytes)))
    image.write_frames()
    for number, item in enumerate(layout.items):
        thing = state.get(item.spec.key)
        if isinstance(thing, torch.Tensor):
            part = thing[tuple(slice(a, a + n) for a, n in zip(item.spec.start, item.spec.shape, strict=True))]
            image.payloads[number].copy_(part)
        elif item.spec.key != EXTRA:
            image.put_value(number, thing)
    return image


def recut(wanted: ImageLayout, old: dict[int, StateImage], *, shares: frozenset[int] = frozenset()) -> memoryview:
    """Put a new image together; of the ranks in `shares` only what they own is held."""
    plan, image = ImageRecut(wanted), memoryview(bytearray(wanted.image_bytes))
    empty = StateImage(wanted, image)
    empty.write_frames()
    for rank, held in old.items():
        plan.add_layout(held.layout, whole=rank not in shares, near=rank % 2 == 0)
    for piece in plan.list_pieces():
        for at in range(1 if shares else len(piece.holders)):  # whoever of them is asked
            rank, item = piece.holders[at]
            start, end = covering_range(item, piece.box)
            assert not is_run(item, piece.box) or end - start == item.spec.bytes or piece.box[1] != item.spec.shape
            put(image, piece, item, old[rank].memory[start:end])
    return image


def put(image: memoryview, piece: RecutPiece, item: ImageItem, came: memoryview) -> None:
    if piece.compared:
        if differing_piece(image, piece, item, came):
            raise RecutError(f"ranks hold different tensors named {item.spec.key}")
    elif item.spec.dtype:
        place_piece(image, piece, item, came)
    else:
        place_value(image, piece.item, came)


def make_state() -> State:
    torch.manual_seed(5)
    return {
        "weight": torch.randn(13, 10),
        "deep": torch.randn(9, 4, 6, dtype=torch.float64),
        "bias": torch.randn(7).to(torch.bfloat16),
        "flags": torch.rand(11, 6) > 0.5,
        "waves": torch.randn(6, 8, dtype=torch.complex128),
        "narrow": torch.randn(5000, 2).half(),
        "step": torch.tensor(17.0),
        "none": torch.empty(0, 3),
        "lr": 1e-3,
        "betas": (0.9, 0.95),
    }


PLACES = {
    "rows of 1": (rows_of(1), 1),
    "rows of 2": (rows_of(2), 2),
    "rows of 3": (rows_of(3), 3),
    "rows of 8": (rows_of(8), 8),
    "a mesh of 2 x 2": (columns_and_rows(2, 2), 4),
    "a mesh of 3 x 2": (columns_and_rows(3, 2), 6),
    "a mesh of 1 x 4": (columns_and_rows(1, 4), 4),
    "2 shards of 3 copies": (replicas_of(2, 3), 6),
    "3 shards of 2 copies": (replicas_of(3, 2), 6),
}


@pytest.fixture(scope="module")
def laid() -> dict[str, dict[int, StateImage]]:
    state = make_state()
    return {
        name: {rank: fill(state, lay_out(state, place, rank, world)) for rank in range(world)}
        for name, (place, world) in PLACES.items()
    }


@pytest.mark.parametrize("after", PLACES)
@pytest.mark.parametrize("before", PLACES)
def test_any_layout_is_cut_into_any_other_bit_for_bit(
    laid: dict[str, dict[int, StateImage]], before: str, after: str
) -> None:
    for number, wanted in enumerate(laid[after].values()):
        shares = frozenset(laid[before] if number % 2 else ())  # as backups, which have what their rank owns
        assert recut(wanted.layout, laid[before], shares=shares) == wanted.memory


def test_large_records_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.checkpoint.image_recut._PIECE_BYTES", 100)
    state = make_state()
    images = {rank: fill(state, lay_out(state, rows_of(2), rank, 2)) for rank in range(2)}
    wanted = fill(state, lay_out(state, columns_and_rows(1, 4), 1, 4))
    assert recut(wanted.layout, images) == wanted.memory
    plan = ImageRecut(wanted.layout)
    for held in images.values():
        plan.add_layout(held.layout, whole=True, near=True)
    ranges = [covering_range(piece.holders[0].item, piece.box) for piece in plan.list_pieces()]
    sizes = [end - start for start, end in ranges]
    assert len(sizes) > 100 and max(sizes) <= 600, "a row of what is divided by columns is read whole"


def test_of_replicas_one_is_enough() -> None:
    state = make_state()
    layouts = {rank: lay_out(state, replicas_of(2, 2), rank, 4) for rank in range(4)}
    assert [find_cut_span(layout) for layout in layouts.values()] == [(0, 2, 2), (1, 2, 2), (2, 1, 1), (1, 2, 2)]
    images = {rank: fill(state, layouts[rank]) for rank in (0, 3)}  # rank 0 owns what only its own copy counts of
    wanted = fill(state, lay_out(state, rows_of(3), 2, 3))
    assert recut(wanted.layout, images) == wanted.memory
    with pytest.raises(RecutError) as caught:
        recut(wanted.layout, {0: images[0]})
    assert str(caught.value) == "the states that are held have not all of bias, or parts of it twice"


def in_groups(state: State, rank: int) -> ImageLayout:
    """A mesh of 2 x 2, in which each column has a tensor of its own that all columns call by the same name."""
    layout = lay_out(state, rows_of(2), rank // 2, 2)
    group = (rank % 2, rank % 2 + 2)

    def move(spec: RecordSpec) -> RecordSpec:
        if spec.key == EXTRA:
            return extra_spec(4096, rank, 4)
        replicas = (rank,) if spec.replicas != (0, 1) else group
        return msgspec.structs.replace(spec, group=group, replicas=replicas, alike=True)

    return arrange_image([move(item.spec) for item in layout.items], record_sizes, rank=rank, world=4)


def test_groups_that_use_one_name_must_hold_the_same() -> None:
    state = {"norm": torch.randn(8, 3), "scale": torch.tensor(2.0), "lr": 0.5}
    images = {rank: fill(state, in_groups(state, rank)) for rank in range(4)}
    wanted = fill(state, lay_out(state, rows_of(3), 1, 3))
    assert recut(wanted.layout, images) == wanted.memory
    for key, other in (("norm", torch.randn(8, 3)), ("scale", torch.tensor(3.0)), ("lr", 0.25)):
        strange = images | {rank: fill(state | {key: other}, in_groups(state, rank)) for rank in (1, 3)}
        with pytest.raises(RecutError) as caught:
            recut(wanted.layout, strange)
        assert str(caught.value) == f"ranks hold different tensors named {key}"


def test_many_groups_with_tensors_of_one_name_are_too_many_to_compare() -> None:
    state = {"table": torch.randn(4096, 3)}

    def alone(key: str, shape: tuple[int, ...], rank: int) -> Part:
        return whole(shape), (rank,), (rank,)

    images = {rank: fill(state, lay_out(state, alone, rank, 4)) for rank in range(4)}
    with pytest.raises(RecutError) as caught:
        recut(lay_out(state, rows_of(1), 0, 1), images)
    assert str(caught.value) == "too many groups of ranks have a table of their own"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"weight": torch.randn(13, 11)}, r"weight is float32\[13, 11\], and was float32\[13, 10\]"),
        ({"weight": torch.randn(13, 10).half()}, r"weight is float16\[13, 10\], and was float32\[13, 10\]"),
        ({"weight": 3}, r"weight is a value, and was float32\[13, 10\]"),
        ({"more": torch.randn(3)}, "have not all of more"),
    ],
)
def test_another_model_is_refused(changed: State, why: str) -> None:
    state = make_state()
    images = {rank: fill(state, lay_out(state, rows_of(2), rank, 2)) for rank in range(2)}
    with pytest.raises(RecutError, match=why):
        recut(lay_out(state | changed, rows_of(3), 0, 3), images)


def test_values_and_extras_that_have_outgrown_their_room_are_refused() -> None:
    few, many = {"names": ["a"]}, {"names": ["a" * 500]}
    images = {rank: fill(many, lay_out(many, rows_of(2), rank, 2)) for rank in range(2)}
    wanted = lay_out(few, rows_of(3), 0, 3)
    with pytest.raises(RecutError) as caught:
        recut(wanted, images)
    assert str(caught.value) == "names takes more room than this rank has for it"
    assert recut(lay_out(many, rows_of(3), 0, 3), {0: fill(few, lay_out(few, rows_of(1), 0, 1))})
    plan, image = ImageRecut(wanted), memoryview(bytearray(wanted.image_bytes))
    place_extra(image, plan.extra, b"x" * 4096)
    assert bytes(image[plan.extra.payload : plan.extra.payload + 4096]) == b"x" * 4096
    with pytest.raises(RecutError) as caught:
        place_extra(image, plan.extra, b"x" * 4097)
    assert str(caught.value) == "the extras take more room than this rank has for them"


def test_what_a_script_writes_through_torch_is_not_cut() -> None:
    """Its layout does not tell who holds a tensor, and has one extra record for all ranks."""
    layout = lay_out(make_state(), rows_of(2), 1, 2)
    items = [item.spec if item.spec.key != EXTRA else extra_spec(4096, 0, 1) for item in layout.items]
    strange = arrange_image(items, record_sizes, rank=1, world=2)
    assert find_cut_span(layout) == (1, 1, 1) and find_cut_span(strange) is None
    with pytest.raises(RecutError) as caught:
        ImageRecut(strange)
    assert str(caught.value) == "rank 1 saves its state in a form that cannot be cut"
    with pytest.raises(RecutError) as caught:
        ImageRecut(lay_out(make_state(), rows_of(3), 1, 3)).add_layout(strange, whole=True, near=True)
    assert str(caught.value) == "the layout of what rank 1 had cannot be cut"
