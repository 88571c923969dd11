"""Which way each item of a state on a GPU takes into its slot."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from holdfast.checkpoint.layout import BIG_BYTES, EXTRA, Layout, Range
from holdfast.client.found import ABSENT

FIRST = 64  # where things begin in a stage: before lie the words of the slot's header

HOST, DEVICE, NOTHING = "host", "device", ""


class Run(NamedTuple):
    """Small things side by side, copied as one."""

    image: Range
    at: int  # in a stage


class Split(NamedTuple):
    direct: list[int]  # large: straight into the slot
    late: list[int]  # large, by way of a shadow on the GPU
    packed: list[int]  # small: put together on the GPU first
    early: list[int]  # small, by way of a shadow: it may change before the optimizer's step
    host: list[int]  # small, and not on the GPU
    runs: list[Run]  # all that is small, with what torch writes around it
    places: dict[int, int]  # where the payloads of small things lie in a stage
    stage_bytes: int

    @property
    def shadowed(self) -> list[int]:
        return [*self.early, *self.late]


def kinds_of(layout: Layout, things: Sequence[object]) -> list[str]:
    """Where everything lies now."""
    return [_kind(thing, item.spec.key) for thing, item in zip(things, layout.items, strict=True)]


def split(layout: Layout, kinds: Sequence[str], steady: Sequence[bool], tail: Collection[int]) -> Split:
    """`steady` things stay as they are until they are copied; of these the `tail` shall not keep the optimizer."""
    found = Split([], [], [], [], [], [], {}, 0)
    at, start, end = FIRST, -1, -1  # of the run that is being made

    def close() -> None:
        nonlocal at, start
        if start >= 0:
            found.runs.append(Run(Range(start, end), at))
            at += -(-(end - start) // FIRST) * FIRST
        start = -1

    for index, (item, kind) in enumerate(zip(layout.items, kinds, strict=True)):
        large = item.spec.bytes >= BIG_BYTES and kind != HOST
        if large:
            close()
        elif start < 0:
            start = item.offset
        if not large:
            end = item.end
            found.places[index] = at + item.payload - start
        _way(found, kind, large, steady[index] and index not in tail).append(index)
    close()
    return found._replace(stage_bytes=at)


def longer(layout: Layout, found: Split, want: float, most: int) -> frozenset[int]:
    """The tail that leaves so many bytes to be copied straight away; no larger than `most` bytes."""
    tail = list(found.late)
    size = {index: layout.items[index].spec.bytes for index in (*found.direct, *found.late)}
    left, held = sum(size[index] for index in found.direct), sum(size[index] for index in tail)
    for index in reversed(found.direct):
        if left <= want:
            break
        if held + size[index] <= most:
            tail.append(index)
            left, held = left - size[index], held + size[index]
    return frozenset(tail)


def _way(found: Split, kind: str, large: bool, steady: bool) -> list[int]:
    if kind == HOST:
        return found.host
    if kind == NOTHING:
        return []
    if large:
        return found.direct if steady else found.late
    return found.packed if steady else found.early


def _kind(thing: object, key: str) -> str:
    if isinstance(thing, torch.Tensor):
        return HOST if thing.is_cpu else DEVICE
    return NOTHING if thing is ABSENT and key != EXTRA else HOST
