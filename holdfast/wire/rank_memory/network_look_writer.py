"""A rank's looks at whether its collectives keep the network busy, in the first page of its flight log.

The agent orders looks, so many in all and at such a distance, and the rank appends them to a ring. Nothing of this is
written by the thread that trains. This module imports little, because every rank pays for its imports.
"""

import mmap
import struct
from zlib import crc32

ORDER_AT, RING_AT = 64, 128  # after the counter of requests for stacks; up to the flight records
RING, LOOK_BYTES = 120, 32
LEAST_SPACING_S, MOST_SPACING_S = 0.004, 10.0

ORDER = struct.Struct("<Qd")  # looks wanted since the launch, seconds between them
LOOK = struct.Struct("<IqddI")  # number and whether it was busy, step, begin of the next step, when; then the checksum
Buffer = mmap.mmap | memoryview


class NetworkLookLog:
    """Writes the looks of one rank in one generation; used by one thread only."""

    def __init__(self, buf: Buffer, at: int) -> None:
        self._buf = buf
        self._at = at
        self.count = 0  # looks so far

    def read_order(self) -> tuple[int, float]:
        """Return how many looks are wanted in all, and the seconds between them."""
        wanted, spacing_s = ORDER.unpack_from(self._buf, self._at + ORDER_AT)
        return wanted, min(max(spacing_s, LEAST_SPACING_S), MOST_SPACING_S)

    def append_look(self, step: int, begun_at: float, at: float, *, busy: bool) -> None:
        """Append a look that was made `at`, after a step that ended at `begun_at`."""
        self.count += 1
        body = LOOK.pack(self.count << 1 | busy, step, begun_at, at, 0)[:-4]
        start = self._at + RING_AT + self.count % RING * LOOK_BYTES
        self._buf[start : start + LOOK.size] = body + struct.pack("<I", crc32(body))
