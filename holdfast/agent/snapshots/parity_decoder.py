"""Decodes half of a lost rank's share from a parity and the state of the other rank of the pair."""

from collections.abc import Sequence

import msgspec
import xxhash

from holdfast.agent.snapshots.keeper_interfaces import KeeperLinks
from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.checkpoint.parity_image import SUM_BYTES, Cut, make_parity_layout, xor_into
from holdfast.checkpoint.peer_transport import CHUNK_BYTES, PeerRequest, TransportError
from holdfast.model.state_copy import Address

_CHUNKS = 4  # fetched at once
Run = tuple[int, int, int]  # bytes from..to of the holder's image, and where in ours they go


class KeeperSource(msgspec.Struct, frozen=True):
    """A keeper to pull a state from: its address, and a request to which each pull adds byte ranges."""

    links: KeeperLinks
    address: Address
    ask: PeerRequest

    def pull_ranges(self, ranges: Sequence[Cut], views: Sequence[memoryview]) -> None:
        if ranges:
            self.links.pull_state(self.address, msgspec.structs.replace(self.ask, ranges=tuple(ranges)), views)


class ParityDecoder:
    """Decodes one rank's half from a parity, given the other rank's state."""

    def __init__(self, parity: KeeperSource, other: KeeperSource, wanted: ImageLayout, there: ImageLayout) -> None:
        assert parity.ask.pair is not None
        self._parity = parity
        self._other = other
        self._half = parity.ask.pair.index(parity.ask.rank)
        self._shape = make_parity_layout(*((wanted, there) if self._half == 0 else (there, wanted)))
        size = min(_CHUNKS * CHUNK_BYTES, self._shape.bytes)
        self._room = memoryview(bytearray(size)), memoryview(bytearray(size))

    def decode_runs(self, image: memoryview, runs: Sequence[Run]) -> None:
        """Decode these byte ranges into the wanted rank's image; fetch only the chunks that contain them."""
        chunks = self._shape.chunks[self._half]
        sums = memoryview(bytearray(SUM_BYTES * len(chunks)))
        at = self._shape.checksums_at(self._half)
        self._parity.pull_ranges([(at, at + len(sums))] if sums else [], [sums])
        for first in range(0, len(chunks), _CHUNKS):
            some = chunks[first : first + _CHUNKS]
            if any(start < high and low < end for low, high in some for start, end, _ in runs):
                self._decode_chunks(first, some, sums, (image, runs))

    def _decode_chunks(
        self, first: int, some: Sequence[Cut], sums: memoryview, into: tuple[memoryview, Sequence[Run]]
    ) -> None:
        starts = self._shape.starts[self._half]
        begin, end = starts[first], starts[first + len(some)]
        cuts = self._shape.other_cuts(self._half, begin, end)
        both, there = self._room[0][: end - begin], self._room[1][: sum(high - low for low, high in cuts)]
        self._parity.pull_ranges([(begin, end)], [both])
        views, at = [], 0
        for low, high in cuts:
            views.append(there[at : at + high - low])
            at += high - low
        self._other.pull_ranges(cuts, views)
        xor_into(both[: len(there)], there)
        for number, (low, high) in enumerate(some, first):
            chunk = both[starts[number] - begin :][: high - low]
            if xxhash.xxh3_64_digest(chunk) != bytes(sums[SUM_BYTES * number :][:SUM_BYTES]):
                raise TransportError(f"the parity of rank {self._parity.ask.rank} decodes to other bytes than it sent")
            _place_chunk(chunk, low, into)


def _place_chunk(chunk: memoryview, low: int, into: tuple[memoryview, Sequence[Run]]) -> None:
    """Copy the wanted bytes of a chunk to their places in the image; `low` is the chunk's offset at its source."""
    image, runs = into
    high = low + len(chunk)
    for start, end, to in runs:
        a, b = max(start, low), min(end, high)
        if a < b:
            image[to + a - start : to + b - start] = chunk[a - low : b - low]
