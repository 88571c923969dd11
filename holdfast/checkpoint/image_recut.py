"""Cuts the images of one number of ranks anew for another: where each byte of a rank's image lies in theirs.

Every image's layout tells of each record which part of which tensor it is. A record of the new image is put together
from the parts of the old records that overlap it. Several groups of ranks may use one name. As in checkpoints, the
first group's tensor counts. Here that is only allowed if the others hold the same bytes, so it loses nothing.
"""

from collections.abc import Iterator
from math import prod
from typing import Literal, NamedTuple

import msgspec

from holdfast.checkpoint.image_layout import EXTRA, ImageItem, ImageLayout, Ranks
from holdfast.checkpoint.snapshot_metadata_record import ImageMetadata, pack_metadata

_PIECE_BYTES = 16 << 20  # of an old record that are read at once, unless one of its rows is larger
_UNITS: dict[int, Literal["Q", "I", "H", "B"]] = {8: "Q", 4: "I", 2: "H", 1: "B"}

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]  # where in the whole tensor it begins, and its shape
RankSpan = tuple[int, int, int]  # ranks: the first, the stride, how many


class RecutError(Exception):
    """Says in one sentence why an image cannot be put together from those of another number of ranks."""


class OldRecord(NamedTuple):
    """A record in the image of an old rank."""

    rank: int
    item: ImageItem


_Boxes = dict[Box, list[tuple[bool, OldRecord]]]  # of one tensor: who has them, and whether near


class RecutPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a new record that lies in one old record, and the old images that have this record, best first."""

    item: ImageItem  # of the new image
    box: Box
    holders: tuple[OldRecord, ...]
    compared: bool = False  # of another group of ranks: it must be as the new record is already


def find_cut_span(layout: ImageLayout) -> RankSpan | None:
    """Return the ranks whose shares can be cut out of a whole image of this layout; None if it cannot be cut. These are
    the image's own rank, and the replicas that hold the very same records. A replica of which only its own copy counts
    is left out."""
    if not _is_cuttable(layout):
        return None
    items = [item for item in layout.items if item.spec.key != EXTRA]
    alike = set.intersection({layout.rank, *range(layout.world)}, *(set(item.spec.replicas) for item in items))
    alike -= {item.owner for item in items if not item.spec.alike}
    ranks = sorted(alike | {layout.rank})
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    is_even = ranks == list(range(ranks[0], ranks[-1] + 1, stride))
    return (ranks[0], stride, len(ranks)) if is_even else (layout.rank, 1, 1)


def _is_cuttable(layout: ImageLayout) -> bool:
    """Return whether this is a layout of a Checkpointer, which tells of each record who holds it."""
    extra = [item.spec.whole for item in layout.items if item.spec.key == EXTRA]
    known = all(layout.rank in item.spec.replicas and layout.rank in item.spec.group for item in layout.items)
    return known and [shape[:1] for shape in extra] == [(layout.world,)]


class ImageRecut:
    """Gathers from old layouts where the records of one new image lie. `extra` is the new image's extra record."""

    def __init__(self, wanted: ImageLayout) -> None:
        if not _is_cuttable(wanted):
            raise RecutError(f"rank {wanted.rank} saves its state in a form that cannot be cut")
        self.wanted = wanted
        self._items: dict[str, list[ImageItem]] = {}
        for item in wanted.items:
            if item.spec.key != EXTRA:
                self._items.setdefault(item.spec.key, []).append(item)
        self.extra = next(item for item in wanted.items if item.spec.key == EXTRA)
        self.extras: dict[int, ImageItem] = {}  # by old rank: its extra record
        self._found: dict[int, dict[Ranks, _Boxes]] = {}  # by the new record's offset and the old group

    def add_layout(self, layout: ImageLayout, *, whole: bool, near: bool) -> None:
        """Take note of what an old image holds of the new one. If only the rank's share is held, it is not `whole`.
        Images that are `near` come first. Raises RecutError if a record has another type or shape."""
        if not _is_cuttable(layout):
            raise RecutError(f"the layout of what rank {layout.rank} had cannot be cut")
        for item in layout.items:
            if item.spec.key == EXTRA:
                self.extras[layout.rank] = item
            elif item.owner == layout.rank or (whole and item.spec.alike):
                self._add_record(OldRecord(layout.rank, item), near=near)

    def _add_record(self, old: OldRecord, *, near: bool) -> None:
        names = (old.item.spec.key, *(".".join(map(str, path)) for path in old.item.spec.aliases))
        for wanted in [one for name in names for one in self._items.get(name, ())]:
            self._add_overlap(wanted, old, near=near)

    def _add_overlap(self, wanted: ImageItem, old: OldRecord, *, near: bool) -> None:
        spec, there = wanted.spec, old.item.spec
        if (spec.dtype, spec.whole) != (there.dtype, there.whole):
            now, then = _describe_kind(spec.dtype, spec.whole), _describe_kind(there.dtype, there.whole)
            raise RecutError(f"{spec.key} is {now}, and was {then}")
        box = _overlap(spec.start, spec.shape, there.start, there.shape)
        if box is not None:
            boxes = self._found.setdefault(wanted.offset, {}).setdefault(there.group, {})
            boxes.setdefault(box, []).append((near, old))

    def list_pieces(self) -> Iterator[RecutPiece]:
        """Yield all pieces of the new image, those that are only compared last. Raises RecutError if old images lack a
        part of it, or if too much would have to be compared."""
        yield from [piece for items in self._items.values() for item in items for piece in self._pieces_of(item)]
        others = [piece for items in self._items.values() for item in items for piece in self._other_groups(item)]
        if sum(_box_bytes(piece.item, piece.box) for piece in others) > self.wanted.image_bytes:
            raise RecutError(f"too many groups of ranks have a {others[0].item.spec.key} of their own")
        yield from others

    def _pieces_of(self, item: ImageItem) -> Iterator[RecutPiece]:
        if item.spec.bytes:
            groups = self._found.get(item.offset, {})
            yield from self._group_pieces(item, groups[min(groups)] if groups else {}, compared=False)

    def _other_groups(self, item: ImageItem) -> Iterator[RecutPiece]:
        groups = self._found.get(item.offset, {}) if item.spec.bytes else {}
        for group in sorted(groups)[1:]:
            yield from self._group_pieces(item, groups[group], compared=True)

    def _group_pieces(self, item: ImageItem, boxes: _Boxes, *, compared: bool) -> Iterator[RecutPiece]:
        if sum(prod(shape) for _, shape in boxes) != prod(item.spec.shape):
            raise RecutError(f"the states that are held have not all of {item.spec.key}, or parts of it twice")
        for box, held in boxes.items():
            holders = tuple(old for _, old in sorted(held, key=self._preference))
            for part in _cut_box(holders[0].item, box):
                yield RecutPiece(item=item, box=part, holders=holders, compared=compared)

    def _preference(self, held: tuple[bool, OldRecord]) -> tuple[bool, int]:
        """Return the sort key of a holder: near ones first; of others, each new rank begins with another one."""
        near, old = held
        return not near, (old.rank - self.wanted.rank) % max(1, len(self.extras))


def covering_range(item: ImageItem, box: Box) -> tuple[int, int]:
    """Return the range of bytes of an image, from the first to the last byte of this box in the record."""
    if not item.spec.dtype:
        return item.payload, item.payload + item.spec.bytes
    size, strides = _strides(item)
    first = item.payload + _offset_in(item, box[0], strides)
    return first, first + sum((n - 1) * stride for n, stride in zip(box[1], strides, strict=True)) + size


def is_run(item: ImageItem, box: Box) -> bool:
    """Return whether the bytes of this box follow one another in the record."""
    start, end = covering_range(item, box)
    return end - start == _box_bytes(item, box)


def place_value(image: memoryview, item: ImageItem, came: memoryview) -> None:
    """Copy a value into its room in the new image. Raises RecutError if it does not fit."""
    room = item.spec.bytes
    if any(came[room:]):
        raise RecutError(f"{item.spec.key} takes more room than this rank has for it")
    image[item.payload : item.payload + room] = bytes(came[:room]).ljust(room, b"\0")


def place_piece(image: memoryview, piece: RecutPiece, old: ImageItem, came: memoryview) -> None:
    """Copy a piece into the new image. `came` has the bytes of the old record's covering range."""
    size, there = _strides(old)
    here, item = _strides(piece.item)[1], piece.item
    start, end = covering_range(item, piece.box)
    _copy_rows(image[start:end], came, [*zip(piece.box[1], here, there, strict=True)], size)


def differing_piece(image: memoryview, piece: RecutPiece, old: ImageItem, came: memoryview) -> bool:
    """Return whether the new image has other bytes at the place of this piece."""
    if not piece.item.spec.dtype:
        room = min(piece.item.spec.bytes, len(came))
        return image[piece.item.payload : piece.item.payload + room] != came[:room]
    start, end = covering_range(piece.item, piece.box)
    copied = memoryview(bytearray(image[start:end]))
    size, there = _strides(old)
    _copy_rows(copied, came, [*zip(piece.box[1], _strides(piece.item)[1], there, strict=True)], size)
    return copied != image[start:end]


def pack_recut_extra(step: int, told: ImageMetadata, absent: set[str]) -> bytes:
    """Return the extra record of a state that was cut anew: extras of one old rank, and no random number generators."""
    return pack_metadata(ImageMetadata(step=step, made=told.made, absent=sorted(absent), extra=told.extra))


def place_extra(image: memoryview, item: ImageItem, content: bytes) -> None:
    """Write the new image's extra record. Raises RecutError if it does not fit."""
    if len(content) > item.spec.bytes:
        raise RecutError("the extras take more room than this rank has for them")
    image[item.payload : item.payload + len(content)] = content


def _describe_kind(dtype: str, whole: Shape) -> str:
    return f"{dtype}{list(whole)}" if dtype else "a value"


def _overlap(start: Shape, shape: Shape, there: Shape, size: Shape) -> Box | None:
    """Return the box that two boxes of a tensor share; None if they share nothing."""
    first = tuple(map(max, start, there))
    ends = tuple(min(a + n, b + m) for a, n, b, m in zip(start, shape, there, size, strict=True))
    counts = tuple(end - begin for begin, end in zip(first, ends, strict=True))
    return (first, counts) if all(count > 0 for count in counts) else None


def _cut_box(item: ImageItem, box: Box) -> Iterator[Box]:
    """Cut a box along its first dimension of several rows, such that no part takes too many bytes of the old record."""
    start, end = covering_range(item, box)
    if not item.spec.dtype or end - start <= _PIECE_BYTES:
        yield box
        return
    dim = next((dim for dim, count in enumerate(box[1]) if count > 1), None)
    if dim is None:
        yield box
        return
    rows = max(1, box[1][dim] * _PIECE_BYTES // (end - start))
    for first in range(0, box[1][dim], rows):
        begin, shape = list(box[0]), list(box[1])
        begin[dim], shape[dim] = begin[dim] + first, min(rows, box[1][dim] - first)
        yield tuple(begin), tuple(shape)


def _box_bytes(item: ImageItem, box: Box) -> int:
    return prod(box[1]) * _strides(item)[0] if item.spec.dtype else item.spec.bytes


def _strides(item: ImageItem) -> tuple[int, Shape]:
    """Return the bytes of one number of the record's tensor, and from one row to the next in each dimension."""
    shape = item.spec.shape
    size = item.spec.bytes // max(1, prod(shape))
    return size, tuple(size * prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _offset_in(item: ImageItem, at: Shape, strides: Shape) -> int:
    return sum((a - b) * stride for a, b, stride in zip(at, item.spec.start, strides, strict=True))


def _copy_rows(to: memoryview, came: memoryview, dims: list[tuple[int, int, int]], size: int) -> None:
    """Copy numbers of `size` bytes between two arrays. A dimension is a count, and the two strides in bytes."""
    inner = [*_merge_dims(dims), (1, size, size)]
    if inner[-2:-1] and inner[-2][1:] == (size, size):
        inner[-2:] = [(inner[-2][0], size, size)]
    *outer, (count, _, _) = inner
    _copy_runs(to, came, outer, count * size)


def _copy_runs(to: memoryview, came: memoryview, dims: list[tuple[int, int, int]], run: int) -> None:
    if not dims:
        to[:run] = came[:run]
        return
    (count, here, there), *rest = dims
    if not rest and run < count:  # many short runs: copy the first number of all of them, then the second
        unit = next(unit for unit in (8, 4, 2, 1) if not (run | here | there) % unit)
        for at in range(0, run, unit):
            _cast(to, at, unit)[:: here // unit][:count] = _cast(came, at, unit)[:: there // unit][:count]
        return
    for row in range(count):
        _copy_runs(to[row * here :], came[row * there :], rest, run)


def _cast(view: memoryview, at: int, unit: int) -> memoryview:
    whole = (len(view) - at) // unit * unit
    return view[at : at + whole].cast(_UNITS[unit])


def _merge_dims(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge dimensions whose rows follow one another in both arrays; leave out those of one row."""
    merged: list[tuple[int, int, int]] = []
    for count, here, there in dims:
        if count == 1:
            continue
        if merged and merged[-1][1:] == (count * here, count * there):
            merged[-1] = (merged[-1][0] * count, here, there)
        else:
            merged.append((count, here, there))
    return merged
