"""The writing end of a rank's flight log: what it came to in torch.distributed, in the memory beside its slot.

Two records are written in turn, as in a slot, so that a rank that stands still shows the newest whole one without its
help. A third place is for stacks, written when the node asks for them by raising a number. Every rank pays for the
imports here, so there are few.
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
NAME_CHARS = 48

ASKED = struct.Struct("<Q")
HEAD = struct.Struct("<IIQ")  # checksum of all that follows, length of the body, number
Buffer = mmap.mmap | memoryview
GroupState = tuple[str, int, int, str, float]  # name, newest entered, newest completed, operation, when entered
GroupArrival = tuple[str, int, float]  # group, sequence number, when


def slot_memory_bytes(nproc: int) -> int:
    """Of the memory with the slots and flight logs of a node."""
    return flight_log_offset(nproc, nproc)


def flight_log_offset(nproc: int, index: int) -> int:
    """Where in it the flight log of a rank begins: after all slots, on a page."""
    return -(-nproc * SLOT_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE + index * REGION_BYTES


class FlightLog:
    """One per rank and generation, used by one thread alone."""

    def __init__(self, buf: Buffer, at: int, *, generation: int, rank: int) -> None:
        if at < 0 or at + REGION_BYTES > len(buf):
            raise ValueError(f"there is no flight log at {at}")
        self._buf = buf
        self._at = at
        self._seq = 0
        self._owner = (generation, rank, os.getpid())

    def write_flight(self, at: float, groups: list[GroupState], arrivals: list[GroupArrival]) -> None:
        """The state of every group and the newest arrivals; what is too much is left out, the oldest first."""
        groups = sorted(groups, key=lambda group: -group[4])[:GROUPS]
        arrivals = sorted(arrivals, key=lambda came: -came[2])[:ARRIVALS]
        while len(body := _encode_body(*self._owner, at, groups, arrivals)) > HALF_BYTES - HEAD.size:
            groups, arrivals = groups[: max(1, len(groups) // 2)], arrivals[: len(arrivals) // 2]
        self._seq += 1
        put_record(self._buf, self._at + TOLD_AT + (self._seq & 1) * HALF_BYTES, self._seq, body)

    def newest_question(self) -> int:
        """The number of the newest question for stacks; 0: there was none."""
        number: int = ASKED.unpack_from(self._buf, self._at + ASKED_AT)[0]
        return number

    def write_stacks(self, number: int, threads: list[object]) -> None:
        """Stacks, the most important first; what does not fit is left out."""
        while len(body := _encode_body(*threads)) > STACKS_BYTES - HEAD.size:
            threads = threads[: len(threads) // 2]
        put_record(self._buf, self._at + STACKS_AT, number, body)


def _encode_body(*parts: object) -> bytes:
    return json.dumps(parts, separators=(",", ":")).encode()


def put_record(buf: Buffer, at: int, number: int, body: bytes) -> None:
    rest = HEAD.pack(0, len(body), number)[4:] + body
    buf[at : at + 4 + len(rest)] = struct.pack("<I", crc32(rest)) + rest


def get_record(buf: Buffer, at: int, room: int) -> tuple[int, bytes] | None:
    """Number and body of a record, if it is whole."""
    image = bytes(buf[at : at + room])
    if len(image) < HEAD.size:
        return None
    total, length, number = HEAD.unpack_from(image)
    end = HEAD.size + length
    return (number, image[HEAD.size : end]) if number and end <= room and crc32(image[4:end]) == total else None
