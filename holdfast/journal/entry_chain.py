"""How entries are written as bytes, and the checksum that ties each to the one before it.

msgpack, not JSON: it has every float that a script may tell, also those that are not finite.
"""

import hashlib
import struct

import msgspec

from holdfast.core.decoding import make_decoder
from holdfast.model.event import Decision, Entry, Event

START_BYTES = CHAIN_BYTES = 16
_ENCODER = msgspec.msgpack.Encoder()
_EVENT = make_decoder(msgspec.msgpack.Decoder(Event))
_DECISION = make_decoder(msgspec.msgpack.Decoder(Decision))


class JournalRow(msgspec.Struct, frozen=True):
    """An entry as it lies in the file."""

    seq: int
    at: float
    event: bytes
    decision: bytes
    epoch: int
    chain: bytes

    @property
    def entry(self) -> Entry:
        return Entry(seq=self.seq, at=self.at, event=_EVENT(self.event), decision=_DECISION(self.decision))

    def is_next_of(self, seq: int, chain: bytes) -> bool:
        """Whether it is whole, and the one after this."""
        return self.seq == seq + 1 and self.chain == _chain_checksum(chain, self)


def make_row(entry: Entry, epoch: int, chain: bytes) -> JournalRow:
    """The next row; `chain` is that of the one before it, or what the chain starts from."""
    event, decision = _ENCODER.encode(entry.event), _ENCODER.encode(entry.decision)
    row = JournalRow(entry.seq, entry.at, event, decision, epoch, b"")
    return msgspec.structs.replace(row, chain=_chain_checksum(chain, row))


def parse_row(values: tuple[object, ...]) -> JournalRow | None:
    """None: a damaged file has something else in it."""
    seq, at, event, decision, epoch, chain = values
    whole = isinstance(seq, int) and isinstance(at, float) and isinstance(epoch, int)
    if whole and isinstance(event, bytes) and isinstance(decision, bytes) and isinstance(chain, bytes):
        return JournalRow(seq, at, event, decision, epoch, chain)  # type: ignore[arg-type]
    return None


def heading_checksum(start: bytes, epoch: int, marked: bool) -> bytes:
    """The checksum of what stands beside the entries."""
    return hashlib.blake2b(start + struct.pack("<q?", epoch, marked), digest_size=CHAIN_BYTES).digest()


def _chain_checksum(before: bytes, row: JournalRow) -> bytes:
    numbers = struct.pack("<qqdq", row.seq, row.epoch, row.at + 0.0, len(row.event))  # -0.0 is 0.0 in SQLite
    parts = b"".join((before, numbers, row.event, row.decision))
    return hashlib.blake2b(parts, digest_size=CHAIN_BYTES).digest()
