"""The layout of a rank's state in an image: a `.distcp` file with one record per tensor, fixed before any copy.

First comes the snapshot's metadata, then state that only this rank holds, then state that it shares with replicas.
Each replica owns a slice of the shared state, cut between rows where needed. Together the ranks send and persist
every byte once, each from its own pages.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from math import prod

import msgspec

from holdfast.checkpoint.arena_header import PAGE_BYTES

BIG_BYTES = 1 << 20  # a record from here on starts on a page, so that its memory can be registered by itself
ALIGN_BYTES = 64  # what torch aligns payloads to, counted from the start of their record

EXTRA = "holdfast.extra"  # the key of what a snapshot says beside its tensors: one row of bytes for every rank

Path = tuple[str | int, ...]
Ranks = tuple[int, ...]


class ByteRange(msgspec.Struct, frozen=True):
    """A range of bytes in an image."""

    start: int
    end: int


class RecordSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A record without its place in an image: one tensor, one chunk of a tensor, or one plain value."""

    key: str  # as torch.distributed.checkpoint names it
    path: Path  # where it stands in the nested state dict
    bytes: int
    dtype: str = ""  # empty: a value, which is no tensor
    shape: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()  # shape of the tensor that this is a chunk of
    start: tuple[int, ...] = ()  # where in it
    group: Ranks  # who hold the tensor together
    replicas: Ranks  # who hold this very chunk
    alike: bool = True  # replicas are the same at every step; else the first one's counts
    aliases: tuple[Path, ...] = ()  # other names of the same memory


class ImageItem(msgspec.Struct, frozen=True, kw_only=True):
    """A record with its place in the image."""

    spec: RecordSpec
    owner: int  # the rank that sends and persists it
    offset: int
    length: int
    payload: int  # offset in the image

    @property
    def end(self) -> int:
        return self.offset + self.length


class ImageLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of one rank's image."""

    rank: int
    world: int
    items: tuple[ImageItem, ...]
    image_bytes: int
    form: str = ""  # whose records these are: two versions of torch may write them differently

    @property
    def digest(self) -> bytes:
        """The hash of the layout without owners. Images with the same hash hold the same items at the same offsets."""
        told = [(i.spec.key, i.offset, i.length, i.payload, i.spec.dtype, i.spec.shape) for i in self.items]
        where = [(i.spec.whole, i.spec.start, i.spec.aliases) for i in self.items]
        return blake2b(msgspec.msgpack.encode((1, self.form, self.image_bytes, told, where)), digest_size=32).digest()

    def owned_ranges(self, rank: int | None = None) -> tuple[ByteRange, ...]:
        """Return the ranges of this image that `rank` owns, in whole pages; None means the image's own rank."""
        rank = self.rank if rank is None else rank
        found = []
        for owner, run in groupby(self.items, key=lambda item: item.owner):
            items = list(run)
            if owner == rank:
                found.append(ByteRange(items[0].offset, _round_up(items[-1].end, PAGE_BYTES)))
        return tuple(found)

    def owned_items(self) -> Iterator[tuple[ImageItem, int]]:
        """Yield each item that this rank owns, and its offset in the rank's file (the owned ranges end to end)."""
        before = 0
        for part in self.owned_ranges():
            for item in self.items:
                if part.start <= item.offset and item.end <= part.end:
                    yield item, before + item.offset - part.start
            before += part.end - part.start


Sizes = Callable[[RecordSpec], tuple[int, int]]  # bytes before the payload, bytes of the whole record


def arrange_image(specs: Iterable[RecordSpec], sizes: Sizes, *, rank: int, world: int, form: str = "") -> ImageLayout:
    """Give each record its place and its owner; all replicas compute the same result without communication."""
    items: list[ImageItem] = []
    at, last = 0, -1
    for spec, owner in _assign_owners(specs):
        head, length = sizes(spec)
        at = _round_up(at, PAGE_BYTES if owner != last or spec.bytes >= BIG_BYTES else ALIGN_BYTES)
        items.append(ImageItem(spec=spec, owner=owner, offset=at, length=length, payload=at + head))
        at, last = at + length, owner
    return ImageLayout(rank=rank, world=world, items=tuple(items), image_bytes=_round_up(at, PAGE_BYTES), form=form)


def name_tensors(layouts: Sequence[ImageLayout]) -> dict[tuple[str, Ranks], str]:
    """Return the checkpoint name of each tensor by key and group. If groups use the same key for different tensors, the
    first group keeps the key as the name. Every other group adds the number of its first rank to the key."""
    groups: dict[str, set[Ranks]] = {}
    for layout in layouts:
        for item in layout.items:
            groups.setdefault(item.spec.key, set()).add(item.spec.group)
    named = {}
    for key, held in groups.items():
        for number, group in enumerate(sorted(held)):
            named[key, group] = name_of(key, group) if number else key
    return named


def name_of(key: str, group: Ranks) -> str:
    """Return `key@rank` with the first rank of the group: the name of a tensor whose key another group uses as well."""
    return f"{key}@{group[0]}"


def is_empty_chunk(spec: RecordSpec) -> bool:
    """Return whether this is an empty chunk of a tensor that other ranks hold."""
    return bool(spec.dtype) and not spec.bytes and prod(spec.whole) > 0


def _assign_owners(specs: Iterable[RecordSpec]) -> Iterator[tuple[RecordSpec, int]]:
    """Yield records in image order, each with its owner; shared tensors are split among their replicas."""
    for (kind, replicas), run in groupby(sorted(specs, key=_sort_key), key=lambda spec: _sort_key(spec)[:2]):
        if kind < 2:
            yield from ((spec, replicas[0]) for spec in run)
        else:
            yield from _split_among(list(run), replicas)


def _sort_key(spec: RecordSpec) -> tuple[int, Ranks, bool, str, tuple[int, ...]]:
    kind = -1 if spec.key == EXTRA else 0 if len(spec.replicas) == 1 else 2 if spec.alike else 1
    return kind, spec.replicas, spec.bytes < BIG_BYTES, spec.key, spec.start


def _split_among(specs: list[RecordSpec], replicas: Ranks) -> Iterator[tuple[RecordSpec, int]]:
    """Split a list of records into consecutive runs of about equal size, one for each replica."""
    total, done, turn = sum(spec.bytes for spec in specs), 0, 0
    for spec in specs:
        rows, dim = _count_rows(spec)
        first = 0
        while first < rows:
            until = total * (turn + 1) // len(replicas)
            fit = max(0, round((until - done) * rows / spec.bytes)) if spec.bytes else rows
            count = rows - first if turn == len(replicas) - 1 else min(rows - first, fit)
            if count:
                yield _slice_spec(spec, dim, first, count), replicas[turn]
                done, first = done + spec.bytes * count // rows, first + count
            if first < rows:
                turn += 1


def _count_rows(spec: RecordSpec) -> tuple[int, int]:
    """Return the number of rows a tensor can be cut into in memory order, and the dimension of the cut."""
    if spec.dtype and spec.bytes:
        for dim, size in enumerate(spec.shape):
            if size > 1:
                return size, dim
    return 1, 0


def _slice_spec(spec: RecordSpec, dim: int, first: int, count: int) -> RecordSpec:
    if not spec.shape or count == spec.shape[dim] or not spec.bytes:
        return spec
    shape, start = list(spec.shape), list(spec.start)
    size = spec.bytes * count // shape[dim]
    shape[dim], start[dim] = count, start[dim] + first
    return msgspec.structs.replace(spec, shape=tuple(shape), start=tuple(start), bytes=size)


def _round_up(at: int, to: int) -> int:
    return -(-at // to) * to
