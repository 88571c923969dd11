"""The journal in one SQLite file: write-ahead log, one writer, synced before actions are carried out."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.model.event import Decision, Entry, Event

FORMAT = 1
_EVENT = msgspec.json.Decoder(Event)
_DECISION = msgspec.json.Decoder(Decision)
_ENCODER = msgspec.json.Encoder()

_SCHEMA = """
create table if not exists entry (seq integer primary key, at real not null, event blob not null,
                                  decision blob not null) strict
"""


class JournalError(Exception):
    """The file cannot serve as a journal; one sentence says why."""


class SqliteJournal:
    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        mode = "ro" if read_only else "rwc"
        try:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None)
            self._open(read_only)
        except sqlite3.Error as e:
            raise JournalError(f"{path} cannot be used as a journal: {e}") from None

    def _open(self, read_only: bool) -> None:
        if not read_only:
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = full")
            version = self._version()
            if version == 0:
                self._db.execute(_SCHEMA)
                self._db.execute(f"pragma user_version = {FORMAT}")
        if self._version() != FORMAT:
            raise sqlite3.DatabaseError(f"its format is {self._version()}, this holdfast reads {FORMAT}")

    def _version(self) -> int:
        return int(self._db.execute("pragma user_version").fetchone()[0])

    def append(self, entry: Entry, durable: bool) -> None:
        # Rows that no action depends on gather in an open transaction; the next durable one takes them along.
        if not self._db.in_transaction:
            self._db.execute("begin immediate")
        row = (entry.seq, entry.at, _ENCODER.encode(entry.event), _ENCODER.encode(entry.decision))
        self._db.execute("insert into entry values (?, ?, ?, ?)", row)
        if durable:
            self._db.execute("commit")

    def flush(self) -> None:
        """Readers see what was appended so far."""
        if self._db.in_transaction:
            self._db.execute("commit")

    def read(self, after: int = 0) -> Iterator[Entry]:
        rows = self._db.execute("select seq, at, event, decision from entry where seq > ? order by seq", (after,))
        for seq, at, event, decision in rows:
            yield Entry(seq=seq, at=at, event=_EVENT.decode(event), decision=_DECISION.decode(decision))

    def close(self) -> None:
        self.flush()
        self._db.close()
