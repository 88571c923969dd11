"""Images of simulated states: each page holds the step and the generation that really made it. Keepers copy, write and
fetch these bytes as they do any others. Only the safety checks decode them."""

import struct
from collections.abc import Iterator
from functools import cache

import msgspec

from holdfast.checkpoint.arena_header import PAGE_BYTES
from holdfast.checkpoint.image_layout import ImageItem, ImageLayout, RecordSpec

_TRUTH = struct.Struct("<qqq")


class StateTruth(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The true origin of a simulated state, even if its slot's header or its note on disk says otherwise."""

    step: int
    made: int  # the generation that made it
    nan_at: int = -1  # it leads to NaN at this step; -1: it does not


@cache
def make_layout(rank: int, world: int) -> ImageLayout:
    """Return a rank's layout: its own page, and `world` pages that all ranks hold, one owned by each rank."""
    everybody = tuple(range(world))
    owners = [("own", (rank,), rank), *((f"shared.{owner}", everybody, owner) for owner in everybody)]
    items = tuple(
        ImageItem(
            spec=RecordSpec(key=key, path=(key,), bytes=_TRUTH.size, group=held_by, replicas=held_by),
            owner=owner,
            offset=page * PAGE_BYTES,
            length=_TRUTH.size,
            payload=page * PAGE_BYTES,
        )
        for page, (key, held_by, owner) in enumerate(owners)
    )
    return ImageLayout(rank=rank, world=world, items=items, image_bytes=len(items) * PAGE_BYTES)


def write_truth(image: memoryview, truth: StateTruth) -> None:
    for page in range(0, len(image), PAGE_BYTES):
        _TRUTH.pack_into(image, page, truth.step, truth.made, truth.nan_at)


def read_truths(image: memoryview | bytes) -> Iterator[StateTruth]:
    """Yield the `StateTruth` in each page of an image, or of a copy of a part of it."""
    for page in range(0, len(image), PAGE_BYTES):
        step, made, nan_at = _TRUTH.unpack_from(image, page)
        yield StateTruth(step=step, made=made, nan_at=nan_at)
