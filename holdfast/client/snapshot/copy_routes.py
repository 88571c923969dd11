"""Chooses the route on which each item of a GPU state is copied into its slot."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from holdfast.checkpoint.image_layout import BIG_BYTES, EXTRA, ByteRange, ImageItem, ImageLayout
from holdfast.client.snapshot.state_item_locations import ABSENT

FIRST = 64  # where things begin in a stage: before lie the words of the slot's header

HOST, DEVICE, NOTHING = "host", "device", ""


class PackedRun(NamedTuple):
    """Adjacent small items that are copied together."""

    image: ByteRange
    at: int  # in a stage


class CopyRoutes(NamedTuple):
    direct: list[int]  # large: straight into the slot
    tail: list[int]  # large, by way of a shadow on the GPU: more than the bus takes before the optimizer's step
    loose: list[int]  # large, by way of a shadow that is made at once: it may change before the optimizer's step
    packed: list[int]  # small: put together on the GPU first
    early: list[int]  # small, and it may change before the optimizer's step
    host: list[int]  # small, and not on the GPU
    runs: list[PackedRun]  # all that is small, with what torch writes around it
    places: dict[int, int]  # where the payloads of small things lie in a stage
    stage_bytes: int

    @property
    def at_once(self) -> list[int]:
        return [*self.early, *self.loose]

    @property
    def steady(self) -> list[int]:
        return [*self.direct, *self.tail, *self.packed]

    @property
    def shadowed(self) -> list[int]:
        return [*self.at_once, *self.tail]


def is_large(item: ImageItem) -> bool:
    """Return whether an item is large enough for a copy of its own."""
    return item.spec.bytes >= BIG_BYTES


def guess_kinds(layout: ImageLayout) -> list[str]:
    """Guess from the layout, before the first snapshot, whether each item will be on the GPU or the host."""
    return [DEVICE if item.spec.dtype and item.spec.key != EXTRA else HOST for item in layout.items]


def kinds_of(layout: ImageLayout, things: Sequence[object]) -> list[str]:
    """Return for each item whether it is on the GPU, on the host, or absent."""
    return [_kind_of(thing, item.spec.key) for thing, item in zip(things, layout.items, strict=True)]


def choose_routes(
    layout: ImageLayout, kinds: Sequence[str], steady: Sequence[bool], tail: Collection[int]
) -> CopyRoutes:
    """Choose a route for each item. `steady` says for each item whether only the optimizer's step changes it. The large
    steady items of `tail` are first copied to a shadow on the GPU, so that the step need not wait for the bus."""
    found = CopyRoutes([], [], [], [], [], [], [], {}, 0)
    at, start, end = FIRST, -1, -1  # of the run that is being made

    def close() -> None:
        nonlocal at, start
        if start >= 0:
            found.runs.append(PackedRun(ByteRange(start, end), at))
            at += -(-(end - start) // FIRST) * FIRST
        start = -1

    for index, (item, kind) in enumerate(zip(layout.items, kinds, strict=True)):
        large = is_large(item) and kind != HOST
        if large:
            close()
        elif start < 0:
            start = item.offset
        if not large:
            end = item.end
            found.places[index] = at + item.payload - start
        if kind == HOST:
            found.host.append(index)
        elif kind == DEVICE:
            _route_list(found, large, steady[index], index in tail).append(index)
    close()
    return found._replace(stage_bytes=at)


def lengthen_tail(layout: ImageLayout, found: CopyRoutes, want: float, most: int) -> frozenset[int]:
    """Return a longer tail. About `want` bytes keep the direct route, and shadows get at most `most` bytes."""
    tail = list(found.tail)
    left, held = total_bytes(layout, found.direct), total_bytes(layout, found.shadowed)
    for index in reversed(found.direct):
        if left <= want:
            break
        size = layout.items[index].spec.bytes
        if held + size <= most:
            tail.append(index)
            left, held = left - size, held + size
    return frozenset(tail)


def total_bytes(layout: ImageLayout, indices: list[int]) -> int:
    """Return the size of these items."""
    return sum(layout.items[index].spec.bytes for index in indices)


def _route_list(found: CopyRoutes, large: bool, steady: bool, is_tail: bool) -> list[int]:
    if not large:
        return found.packed if steady else found.early
    if not steady:
        return found.loose
    return found.tail if is_tail else found.direct


def _kind_of(thing: object, key: str) -> str:
    if isinstance(thing, torch.Tensor):
        return HOST if thing.is_cpu else DEVICE
    return NOTHING if thing is ABSENT and key != EXTRA else HOST
