"""The layout and computation of a parity: half of one rank's share XORed with half of another rank's share.

    [first half of one XOR second half of the other, as long as the longer of them][checksums of one][of the other]

Both halves arrive in chunks, each with its xxh3, as keepers send them. The parity keeps these checksums. With them, a
half that is computed back can be verified, whether the parity or the other half has been damaged meanwhile.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import msgspec

from holdfast.checkpoint.arena_header import round_to_pages
from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.checkpoint.peer_transport import cut_range

SUM_BYTES = 8
_BLOCK_BYTES = 1 << 16  # of numbers that Python XORs by itself: longer ones are no faster, and hold up all threads
Cut = tuple[int, int]  # from..to in a rank's image


def half_of(share: Sequence[Cut], number: int) -> tuple[Cut, ...]:
    """Return the first (0) or second (1) half of a share, cut at a page boundary."""
    middle = round_to_pages(sum(end - start for start, end in share) // 2)
    found, before = [], 0
    for start, end in share:
        cut = min(max(start, start + middle - before), end)
        part = (start, cut) if number == 0 else (cut, end)
        if part[0] < part[1]:
            found.append(part)
        before += end - start
    return tuple(found)


class ParityLayout(msgspec.Struct, frozen=True):
    """The position of every chunk and checksum in a parity's image."""

    chunks: tuple[tuple[Cut, ...], tuple[Cut, ...]]  # of the two ranks' images, in the order in which they come
    starts: tuple[tuple[int, ...], tuple[int, ...]]  # where each of them lies in the parity; and where the last ends

    @property
    def bytes(self) -> int:
        return max(starts[-1] for starts in self.starts)

    @property
    def image_bytes(self) -> int:
        return self.checksums_at(2)

    def checksums_at(self, half: int) -> int:
        """Return the offset at which the checksums of a half begin."""
        return self.bytes + SUM_BYTES * sum(map(len, self.chunks[:half]))

    def other_cuts(self, half: int, start: int, end: int) -> list[Cut]:
        """Return which ranges of the other rank's image are XORed into this range of the parity."""
        found = []
        for (low, high), at in zip(self.chunks[1 - half], self.starts[1 - half], strict=False):
            a, b = max(start, at), min(end, at + high - low)
            if a < b:
                found.append((low + a - at, low + b - at))
        return found


def make_parity_layout(first: ImageLayout, second: ImageLayout) -> ParityLayout:
    """Return the layout of a parity: the first half of one rank's share, XORed with the second half of another rank's
    share. A share is the part of a rank's image that this rank backs up for all replicas."""
    halves = [half_of(_share_cuts(layout), half) for half, layout in enumerate((first, second))]
    chunks = [tuple(chunk for part in half for chunk in cut_range(*part)) for half in halves]
    starts = [tuple(accumulate((end - start for start, end in half), initial=0)) for half in chunks]
    return ParityLayout((chunks[0], chunks[1]), (starts[0], starts[1]))


def _share_cuts(layout: ImageLayout) -> list[Cut]:
    return [(part.start, part.end) for part in layout.owned_ranges()]


def xor_into(into: memoryview, other: memoryview) -> None:
    """XOR `other` into `into`, which has the same length. With numpy installed this is some 20 times faster."""
    if numpy := _import_numpy():
        target = numpy.frombuffer(into, numpy.uint8)
        numpy.bitwise_xor(target, numpy.frombuffer(other, numpy.uint8), out=target)
        return
    for at in range(0, len(into), _BLOCK_BYTES):
        block = into[at : at + _BLOCK_BYTES]
        both = int.from_bytes(block, "little") ^ int.from_bytes(other[at : at + _BLOCK_BYTES], "little")
        block[:] = both.to_bytes(len(block), "little")


@cache
def _import_numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy
