"""Encodes journal entries as bytes, and computes their checksums, each of which covers the one before it.

Entries are msgpack, not JSON, because msgpack can hold every float that a script may report, including NaN and
infinity.
"""

import hashlib
import struct
from typing import TYPE_CHECKING

import msgspec

from holdfast.decoding import make_decoder
from holdfast.model.decider_events import Event
from holdfast.model.journal_entry import Decision, Entry

if TYPE_CHECKING:
    from holdfast.journal.journal_key import JournalKey
    from holdfast.journal.local_env_cipher import LocalEnvCipher

START_BYTES = CHAIN_BYTES = 16
_ENCODER = msgspec.msgpack.Encoder()
_EVENT = make_decoder(msgspec.msgpack.Decoder(Event))
_DECISION = make_decoder(msgspec.msgpack.Decoder(Decision))


class JournalRow(msgspec.Struct, frozen=True):
    """An entry as the journal stores it, encoded and with its checksum."""

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
        """Return whether this row is undamaged and directly follows the row with this number and checksum."""
        return self.seq == seq + 1 and self.chain == _chain_checksum(chain, self)


def make_row(entry: Entry, epoch: int, chain: bytes, key: "JournalKey | LocalEnvCipher | None" = None) -> JournalRow:
    """Return an entry as the next row. `chain` is the checksum of the row before, and `key` encrypts environments."""
    event, decision = _ENCODER.encode(entry.event), _ENCODER.encode(entry.decision)
    if key:
        event, decision = key.encrypt_env(event), key.encrypt_env(decision)
    row = JournalRow(entry.seq, entry.at, event, decision, epoch, b"")
    return msgspec.structs.replace(row, chain=_chain_checksum(chain, row))


def parse_row(values: tuple[object, ...]) -> JournalRow | None:
    """Return a table's row as a JournalRow; None if a value has the wrong type, as in a damaged file."""
    seq, at, event, decision, epoch, chain = values
    whole = isinstance(seq, int) and isinstance(at, float) and isinstance(epoch, int)
    if whole and isinstance(event, bytes) and isinstance(decision, bytes) and isinstance(chain, bytes):
        return JournalRow(seq, at, event, decision, epoch, chain)  # type: ignore[arg-type]
    return None


def heading_checksum(start: bytes, epoch: int, marked: bool) -> bytes:
    """Return the checksum of a journal file's heading: the start of the journal, its epoch, and whether it has a mark
    file, which records how far the journal was written."""
    return hashlib.blake2b(start + struct.pack("<q?", epoch, marked), digest_size=CHAIN_BYTES).digest()


def _chain_checksum(before: bytes, row: JournalRow) -> bytes:
    numbers = struct.pack("<qqdq", row.seq, row.epoch, row.at + 0.0, len(row.event))  # -0.0 is 0.0 in SQLite
    parts = b"".join((before, numbers, row.event, row.decision))
    return hashlib.blake2b(parts, digest_size=CHAIN_BYTES).digest()
