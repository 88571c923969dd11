"""Reads and converts journals of the first format: JSON, no checksums, no epochs."""

import sqlite3
from collections.abc import Iterator

import msgspec

from holdfast.decoding import make_decoder
from holdfast.journal.entry_chain import make_row
from holdfast.model.decider_events import Event
from holdfast.model.journal_entry import Decision, Entry

_EVENT = make_decoder(msgspec.json.Decoder(Event))
_DECISION = make_decoder(msgspec.json.Decoder(Decision))


def read_entries(db: sqlite3.Connection, after: int = 0, table: str = "entry") -> Iterator[Entry]:
    query = f"select seq, at, event, decision from {table} where seq > ? order by seq"
    for seq, at, event, decision in db.execute(query, (after,)):
        yield Entry(seq=seq, at=at, event=_EVENT(event), decision=_DECISION(decision))


def convert_entries(db: sqlite3.Connection, schema: str, start: bytes) -> None:
    """Convert all entries to the current format, within the open transaction."""
    db.execute("alter table entry rename to old")
    db.execute(schema)
    chain = start
    for entry in read_entries(db, table="old"):
        row = make_row(entry, 1, chain)
        chain = row.chain
        db.execute("insert into entry values (?, ?, ?, ?, ?, ?)", msgspec.structs.astuple(row))
    db.execute("drop table old")
