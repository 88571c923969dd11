"""Encodes parity: XORs the halves of two ranks into one slot as their chunks arrive.

No half is kept by itself, so an unfinished parity needs only one extra chunk of memory per connection. A chunk that has
arrived whole and undamaged is XORed and counted at the same time. So a broken transfer resumes after the last counted
chunk, and no chunk is XORed twice. The halves may arrive at different speeds.
"""

import threading
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from itertools import pairwise

import msgspec

from holdfast.checkpoint.arena import SnapshotSlot
from holdfast.checkpoint.arena_header import LAYOUT_BYTES
from holdfast.checkpoint.parity_image import SUM_BYTES, ParityLayout, xor_into
from holdfast.checkpoint.peer_server import PushTarget
from holdfast.checkpoint.peer_transport import PeerRefusal, RefusalCode, TransportError

SUPERSEDED = PeerRefusal("a later step has taken its place", RefusalCode.SUPERSEDED)


class ParityPair(msgspec.Struct, frozen=True, kw_only=True):
    """The two ranks whose halves form a parity; also written to disk, for the next agent."""

    ranks: tuple[int, int]  # the first half of one, the second half of the other
    layouts: tuple[str, str]

    @property
    def name(self) -> str:
        return "{}+{}".format(*self.ranks)

    @property
    def digest(self) -> bytes:
        """A digest that tells this pair's memory from another pair's."""
        return blake2b(msgspec.json.encode(self), digest_size=LAYOUT_BYTES).digest()


class ParityEncoder:
    """A parity, the XOR of one half from each of two ranks, while it is being made in a snapshot slot."""

    def __init__(self, slot: SnapshotSlot, shape: ParityLayout, on_half: "Callable[[ParityEncoder], None]") -> None:
        self.slot = slot
        self.sealed = False
        self._on_half = on_half  # called when all of a half is in
        self._shape = shape
        self._reached = 0  # up to here there is something to XOR with; what is behind was never written
        self._over = False
        self._lock = threading.Lock()
        self._halves = [self._make_target(half) for half in (0, 1)]

    @property
    def step(self) -> int:
        return self.slot.name.step

    def half_target(self, number: int) -> PushTarget:
        return self._halves[number]

    def is_complete(self) -> bool:
        with self._lock:
            self._check_wanted()
            return all(half.done == len(half.views) for half in self._halves)

    def cancel(self) -> None:
        """Stop encoding, because the slot is needed for something else."""
        with self._lock:
            self._over = True

    def _make_target(self, half: int) -> PushTarget:
        starts, image = self._shape.starts[half], self.slot.image
        views = [image[start:end] for start, end in pairwise(starts)]
        return PushTarget(views, 0, lambda: self._on_half(self), partial(self._add_chunk, half))

    def _add_chunk(self, half: int, number: int, chunk: memoryview, digest: bytes) -> None:
        holding = self._halves[half]
        with self._lock:
            self._check_wanted()
            if number != holding.done:
                return  # it came by the link that broke, after all
            self._over = True  # what ends in the middle of this cannot be gone on with
            self._xor_chunk(self._shape.starts[half][number], chunk)
            at = self._shape.checksums_at(half) + SUM_BYTES * number
            self.slot.image[at : at + SUM_BYTES] = digest
            holding.done += 1
            self._over = False

    def _xor_chunk(self, at: int, chunk: memoryview) -> None:
        image, end = self.slot.image, at + len(chunk)
        known = min(max(self._reached - at, 0), len(chunk))
        xor_into(image[at : at + known], chunk[:known])
        image[at + known : end] = chunk[known:]
        self._reached = max(self._reached, end)

    def _check_wanted(self) -> None:
        if self._over:
            raise TransportError(*SUPERSEDED)
