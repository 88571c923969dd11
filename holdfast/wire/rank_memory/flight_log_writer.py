"""Writes a rank's flight log: the collectives that it has entered, in the shared memory beside its slot.

Two records are written in turn, as in a slot, so a rank that hangs still shows its newest whole record. A third place
holds stacks, which the rank writes when its node requests them by raising a counter. This module imports little,
because every rank pays for its imports.
"""

import json
import mmap
import os
import struct
from zlib import crc32

from holdfast.wire.rank_memory.slot_writer import SLOT_BYTES

REGION_BYTES = 1 << 16  # of one rank; pages that nobody writes take no memory
HALF_BYTES = 1 << 13
ASKED_AT, TOLD_AT = 0, 1 << 12
STACKS_AT = TOLD_AT + 2 * HALF_BYTES
STACKS_BYTES = REGION_BYTES - STACKS_AT
GROUPS, ARRIVALS = 32, 96  # told at most, the newest
CHANNELS = 32  # told, or none: who leaves some out seems to have sent nothing there
NAME_CHARS = 48

ASKED = struct.Struct("<Q")
HEAD = struct.Struct("<IIQ")  # checksum of all that follows, length of the body, number
Buffer = mmap.mmap | memoryview
# On the GPU: newest begun, its operation ("": not known), since when the next one could begin (0: the rank has entered
# none), and the longest that one has waited so before it began.
GpuState = tuple[int, str, float, float]
# Name, newest entered, newest completed, operation of each ("": not known), when entered, when the oldest open one
# times out (0: not known), and how far the GPU has come, where the backend tells it.
GroupState = tuple[str, int, int, str, str, float, float, GpuState | None]
# Group, source, target, posted, begun and ended on the GPU (None: not known), tag and bytes of the newest.
ChannelState = tuple[str, int, int, int, int | None, int | None, int, int]
GroupArrival = tuple[str, int, float, float | None]  # group, sequence number, when, how long it held the GPU


def slot_memory_bytes(nproc: int) -> int:
    """Return the size of the memory that holds all slots and flight logs of a node."""
    return flight_log_offset(nproc, nproc)


def flight_log_offset(nproc: int, index: int) -> int:
    """Return the offset of a rank's flight log in its node's memory: after all slots, at the start of a page."""
    return -(-nproc * SLOT_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE + index * REGION_BYTES


class FlightLog:
    """Writes the flight log of one rank in one generation; used by one thread only."""

    def __init__(self, buf: Buffer, at: int, *, generation: int, rank: int) -> None:
        if at < 0 or at + REGION_BYTES > len(buf):
            raise ValueError(f"there is no flight log at {at}")
        self._buf = buf
        self._at = at
        self._seq = 0
        self.rank = rank
        self.gpu = ""  # UUID of the rank's GPU; "": not known
        # Since when the GPU could begin the next message (0: none is queued), and the longest that one has waited so.
        self.unbegun = (0.0, 0.0)
        self._owner = (generation, rank, os.getpid())

    def write_flight(
        self,
        at: float,
        groups: list[GroupState],
        arrivals: list[GroupArrival],
        channels: list[ChannelState] | None = None,
        waits: bool = False,
    ) -> None:
        """Write the state of the groups, the newest arrivals, and whether the rank waits in torch.distributed. Also
        write the messages of the channels, if these are counted and not too many. If space runs short, omit first the
        channels, then the oldest arrivals and some groups."""
        channels = channels if channels is None or len(channels) <= CHANNELS else None
        groups = sorted(groups, key=lambda group: -group[5])[:GROUPS]
        arrivals = sorted(arrivals, key=lambda came: -came[2])[:ARRIVALS]
        most = HALF_BYTES - HEAD.size
        rest = (waits, self.unbegun, self.gpu)
        while len(body := _encode_body(*self._owner, at, groups, arrivals, channels, *rest)) > most:
            channels = channels if len(groups) > 1 or arrivals else None
            groups, arrivals = groups[: max(1, len(groups) // 2)], arrivals[: len(arrivals) // 2]
        self._seq += 1
        put_record(self._buf, self._at + TOLD_AT + (self._seq & 1) * HALF_BYTES, self._seq, body)

    def newest_question(self) -> int:
        """Return the number of the newest request for stacks, or 0 if there was none."""
        number: int = ASKED.unpack_from(self._buf, self._at + ASKED_AT)[0]
        return number

    def write_stacks(self, number: int, threads: list[object]) -> None:
        """Write stacks in answer to this request, most important first; threads that do not fit are left out."""
        while len(body := _encode_body(*threads)) > STACKS_BYTES - HEAD.size:
            threads = threads[: len(threads) // 2]
        put_record(self._buf, self._at + STACKS_AT, number, body)


def _encode_body(*parts: object) -> bytes:
    return json.dumps(parts, separators=(",", ":")).encode()


def put_record(buf: Buffer, at: int, number: int, body: bytes) -> None:
    rest = HEAD.pack(0, len(body), number)[4:] + body
    buf[at : at + 4 + len(rest)] = struct.pack("<I", crc32(rest)) + rest


def get_record(buf: Buffer, at: int, room: int) -> tuple[int, bytes] | None:
    """Return number and body of a record, or None if the record is not whole."""
    image = bytes(buf[at : at + room])
    if len(image) < HEAD.size:
        return None
    total, length, number = HEAD.unpack_from(image)
    end = HEAD.size + length
    return (number, image[HEAD.size : end]) if number and end <= room and crc32(image[4:end]) == total else None
