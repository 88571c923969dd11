"""The journal in one SQLite file: write-ahead log, one writer, synced before actions are carried out."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.core.decoding import decoder
from holdfast.model.event import Decision, Entry, Event

FORMAT = 1
_MOST = (1 << 63) - 1  # the largest number of SQLite
_EVENT = decoder(msgspec.json.Decoder(Event))
_DECISION = decoder(msgspec.json.Decoder(Decision))
_ENCODER = msgspec.json.Encoder()

_SCHEMA = """
create table entry (seq integer primary key, at real not null, event blob not null, decision blob not null) strict
"""


class JournalError(Exception):
    """The file cannot serve as a journal; one sentence says why."""


class JournalFullError(JournalError):
    """There is no room for the next entry; what was written before is whole."""


class SqliteJournal:
    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        self._read_only = read_only
        mode = "ro" if read_only else "rwc"
        try:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None)
        except sqlite3.Error as e:
            raise self._error(e) from None
        try:
            self._open()
        except sqlite3.Error as e:
            self._db.close()
            raise self._error(e) from None

    def _open(self) -> None:
        if not self._read_only:
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = full")
            self._db.execute("begin immediate")
            if not self._db.execute("select count(*) from sqlite_schema").fetchone()[0]:
                self._db.execute(_SCHEMA)
                self._db.execute(f"pragma user_version = {FORMAT}")
            self._db.execute("commit")
        version = self._db.execute("pragma user_version").fetchone()[0]
        if version != FORMAT:
            raise sqlite3.DatabaseError(f"its format is {version}, this holdfast reads {FORMAT}")

    def append(self, entry: Entry, durable: bool) -> None:
        row = (entry.seq, entry.at, _ENCODER.encode(entry.event), _ENCODER.encode(entry.decision))
        try:
            # Rows that no action depends on gather in an open transaction; the next durable one takes them along.
            if not self._db.in_transaction:
                self._db.execute("begin immediate")
            self._db.execute("insert into entry values (?, ?, ?, ?)", row)
            if durable:
                self._db.execute("commit")
        except sqlite3.IntegrityError:
            raise JournalError(f"{self._path} has an entry {entry.seq} already: somebody else writes to it") from None
        except sqlite3.Error as e:
            raise self._error(e) from None

    def flush(self) -> None:
        """Readers see what was appended so far."""
        try:
            if self._db.in_transaction:
                self._db.execute("commit")
        except sqlite3.Error as e:
            raise self._error(e) from None

    def read(self, after: int = 0) -> Iterator[Entry]:
        query = "select seq, at, event, decision from entry where seq > ? order by seq"
        try:
            for seq, at, event, decision in self._db.execute(query, (min(max(after, 0), _MOST),)):
                yield Entry(seq=seq, at=at, event=_EVENT(event), decision=_DECISION(decision))
        except (sqlite3.Error, msgspec.DecodeError, TypeError) as e:  # the last: a damaged file has other types
            raise self._error(e) from None

    def close(self) -> None:
        """A journal that is closed is one plain file, readable from a read-only place too."""
        self.flush()
        if not self._read_only:
            try:
                self._db.execute("pragma busy_timeout = 0")
                self._db.execute("pragma journal_mode = delete")
            except sqlite3.OperationalError:
                pass  # somebody reads it just now: it keeps its write-ahead log
        self._db.close()

    def _error(self, why: Exception) -> JournalError:
        if getattr(why, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
            return JournalFullError(f"{self._path} cannot grow: the disk that holds it is full")
        return JournalError(f"{self._path} cannot be used as a journal: {why}")
