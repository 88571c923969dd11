"""Journals of the first format: JSON, no checksums, no epochs."""

import sqlite3
from collections.abc import Iterator

import msgspec

from holdfast.core.decoding import decoder
from holdfast.journal.chain import row_of
from holdfast.model.event import Decision, Entry, Event

_EVENT = decoder(msgspec.json.Decoder(Event))
_DECISION = decoder(msgspec.json.Decoder(Decision))


def read(db: sqlite3.Connection, after: int = 0, table: str = "entry") -> Iterator[Entry]:
    query = f"select seq, at, event, decision from {table} where seq > ? order by seq"
    for seq, at, event, decision in db.execute(query, (after,)):
        yield Entry(seq=seq, at=at, event=_EVENT(event), decision=_DECISION(decision))


def write_anew(db: sqlite3.Connection, schema: str, start: bytes) -> None:
    """In the transaction that is open: the same entries, as ours."""
    db.execute("alter table entry rename to old")
    db.execute(schema)
    chain = start
    for entry in read(db, table="old"):
        row = row_of(entry, 1, chain)
        chain = row.chain
        db.execute("insert into entry values (?, ?, ?, ?, ?, ?)", msgspec.structs.astuple(row))
    db.execute("drop table old")
