"""Orders a rank's looks at its network, and reads them from the first page of its flight log."""

from zlib import crc32

from holdfast.core.snapshots.step_network_profile import NetworkSample
from holdfast.model.message_bounds import MOST, MOST_S
from holdfast.wire.rank_memory.network_look_writer import LOOK, LOOK_BYTES, ORDER, ORDER_AT, RING, RING_AT, Buffer


def order_looks(buf: Buffer, at: int, wanted: int, spacing_s: float) -> None:
    """Have the rank whose flight log begins at `at` make looks until it has made `wanted` of them since its launch."""
    buf[at + ORDER_AT : at + ORDER_AT + ORDER.size] = ORDER.pack(wanted, spacing_s)


def read_looks(buf: Buffer, at: int, after: int) -> tuple[int, list[NetworkSample]]:
    """Return the number of the newest look, or `after` if there is none newer, and the looks after number `after`."""
    image = bytes(buf[at + RING_AT : at + RING_AT + RING * LOOK_BYTES])
    found: list[tuple[int, NetworkSample]] = []
    for start in range(0, len(image), LOOK_BYTES):
        one = image[start : start + LOOK.size]
        number, step, begun_at, looked_at, total = LOOK.unpack(one)
        if number >> 1 <= after or crc32(one[:-4]) != total:
            continue
        # A rank can write anything there. What nobody can have seen is not told.
        if abs(step) <= MOST and 0 <= begun_at <= MOST_S and 0 <= looked_at <= MOST_S:
            found.append((number >> 1, NetworkSample(step, begun_at, looked_at, bool(number & 1))))
    found.sort(key=lambda one: one[0])
    return (found[-1][0] if found else after), [sample for _, sample in found]
