"""A layout: everything has one place, and of what replicas share every byte has one owner."""

from itertools import pairwise
from math import prod

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.image_layout import BIG_BYTES, ByteRange, ImageLayout, RecordSpec, arrange_image, name_tensors

HEAD, TAIL = 704, 873
PAGE = 4096


def sizes(spec: RecordSpec) -> tuple[int, int]:
    return (HEAD, HEAD + spec.bytes + TAIL) if spec.dtype else (0, spec.bytes)


def tensor(key: str, shape: tuple[int, ...], replicas: tuple[int, ...] = (0,), alike: bool = True) -> RecordSpec:
    where = {"shape": shape, "whole": shape, "start": (0,) * len(shape)}
    held = {"group": replicas, "replicas": replicas, "alike": alike}
    return RecordSpec(key=key, path=(key,), bytes=prod(shape) * 4, dtype="float32", **where, **held)  # type: ignore[arg-type]


def value(key: str, replicas: tuple[int, ...] = (0,)) -> RecordSpec:
    return RecordSpec(key=key, path=(key,), bytes=256, group=replicas, replicas=replicas, alike=False)


def lay(specs: list[RecordSpec], rank: int = 0, world: int = 1) -> ImageLayout:
    return arrange_image(specs, sizes, rank=rank, world=world)


def test_alone_a_rank_owns_everything() -> None:
    layout = lay([tensor("b", (600, 600)), tensor("a", (3,)), value("v")])
    assert layout.owned_ranges() == (ByteRange(0, layout.image_bytes),)
    assert [(item.spec.key, at) for item, at in layout.owned_items()] == [(i.spec.key, i.offset) for i in layout.items]
    assert [item.spec.key for item in layout.items] == ["b", "a", "v"], "the large ones come first"


def test_records_do_not_touch_and_are_aligned() -> None:
    layout = lay([tensor(f"t{n}", (n, 100_000)) for n in range(1, 9)] + [value(f"v{n}") for n in range(5)])
    for before, after in pairwise(layout.items):
        assert before.end <= after.offset
    for item in layout.items:
        assert item.payload % 64 == 0
        assert item.offset % (PAGE if item.spec.bytes >= BIG_BYTES else 64) == 0
    assert layout.image_bytes % PAGE == 0
    assert layout.items[-1].end <= layout.image_bytes


def test_only_the_place_of_things_makes_the_digest() -> None:
    specs = [tensor("a", (4, 4)), value("v")]
    layout = lay(specs)
    assert lay(list(reversed(specs))).digest == layout.digest, "the order in which they are found does not matter"
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=ImageLayout)
    assert again == layout and again.digest == layout.digest
    assert lay([tensor("a", (4, 5)), value("v")]).digest != layout.digest
    assert lay([tensor("b", (4, 4)), value("v")]).digest != layout.digest
    assert lay([msgspec.structs.replace(specs[0], dtype="int32"), specs[1]]).digest != layout.digest


def test_replicas_own_slices() -> None:
    ranks = (0, 1, 2, 3)
    specs = [
        tensor("big", (1001, 1000), ranks),
        tensor("one", (1, 1, 7), ranks),
        tensor("b", (10,), ranks, alike=False),
    ]
    layouts = [lay([*specs, tensor(f"own{r}", (r + 1, 9), (r,))], r, 4) for r in ranks]
    assert [[i.spec.key for i, _ in layout.owned_items()] for layout in layouts] == [
        ["own0", "b", "big"],
        ["own1", "big"],
        ["own2", "big"],
        ["own3", "big", "one"],
    ], "what is not alike is taken from the first"
    rows = [item.spec.shape[0] for layout in layouts for item, _ in layout.owned_items() if item.spec.key == "big"]
    assert sum(rows) == 1001 and max(rows) - min(rows) <= 1
    for layout in layouts:  # all have all of it, and agree on who owns it
        mine = {(i.spec.key, i.spec.start, i.owner) for i in layout.items if "own" not in i.spec.key}
        assert mine == {(i.spec.key, i.spec.start, i.owner) for i in layouts[0].items if "own" not in i.spec.key}


def test_shares_are_whole_pages() -> None:
    ranks = (0, 1, 2)
    layouts = [lay([tensor(f"t{n}", (50, 999), ranks) for n in range(20)], r, 3) for r in ranks]
    for layout in layouts:
        for part in layout.owned_ranges():
            assert part.start % PAGE == part.end % PAGE == 0
        (mine,) = layout.owned_ranges()
        assert layouts[0].owned_ranges(layout.rank) == (mine,), "everybody knows everybody's share"


def test_groups_that_use_the_same_name() -> None:
    first, second = lay([tensor("w", (3,), (0,))], 0, 3), lay([tensor("w", (3,), (1, 2))], 1, 3)
    assert name_tensors([first, second]) == {("w", (0,)): "w", ("w", (1, 2)): "w@1"}


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@settings(max_examples=200)
@given(st.lists(shapes, max_size=12), st.integers(1, 5), st.booleans())
def test_every_byte_has_one_owner(found: list[tuple[int, ...]], world: int, alike: bool) -> None:
    ranks = tuple(range(world))
    specs = [tensor(f"t{n}", shape, ranks, alike) for n, shape in enumerate(found)]
    layouts = [lay([*specs, tensor("own", (3,), (r,))], r, world) for r in ranks]
    owned = [(item, at) for layout in layouts for item, at in layout.owned_items()]
    for (before, at), (after, then) in pairwise(owned):
        assert at + before.length <= then or after.owner != before.owner
    cells = [(i.spec.key, cell) for i, _ in owned if i.spec.key != "own" for cell in covered(i.spec)]
    assert len(set(cells)) == len(cells) == sum(prod(shape) for shape in found)


def covered(spec: RecordSpec) -> list[int]:
    """The elements of the whole tensor that a chunk has, counted in memory order."""
    found = [0]
    for size, start, count in zip(spec.whole, spec.start, spec.shape, strict=True):
        found = [place * size + start + n for place in found for n in range(count)]
    return found


@settings(max_examples=100)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(2, 8))
def test_shares_are_balanced(rows: list[int], world: int) -> None:
    ranks = tuple(range(world))
    layout = lay([tensor(f"t{n}", (count, 64), ranks) for n, count in enumerate(rows)], 0, world)
    owned = [sum(i.spec.bytes for i in layout.items if i.owner == r) for r in ranks]
    fair = sum(rows) * 256 / world
    assert all(abs(size - fair) <= 256 for size in owned), "to within a row"
