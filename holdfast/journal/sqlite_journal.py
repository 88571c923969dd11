"""The journal in one SQLite file: one writer, synced before actions are carried out.

The checksum of every entry covers the entry and the checksum of the entry before. A mark in a file of its own records
how far the journal was written. Opening the journal for writing detects and reports entries that are lost or damaged.
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from holdfast.journal import format1_reader, high_water_mark, sqlite_file
from holdfast.journal.entry_chain import START_BYTES, JournalRow, heading_checksum, make_row, parse_row
from holdfast.journal.high_water_mark import HighWaterMark, MarkFile
from holdfast.journal.journal_errors import JournalDamagedError as JournalDamagedError
from holdfast.journal.journal_errors import JournalError as JournalError
from holdfast.journal.journal_errors import JournalFullError as JournalFullError
from holdfast.journal.lease_term import no_lease
from holdfast.journal.local_env_cipher import LocalEnvCipher
from holdfast.model.action import Launch
from holdfast.model.decider_events import Lost
from holdfast.model.journal_entry import Entry

FORMAT = 2
_MOST = (1 << 63) - 1  # the largest number of SQLite
_ENTRY = """
create table entry (seq integer primary key, at real not null, event blob not null, decision blob not null,
    epoch integer not null, chain blob not null) strict
"""
_HEADING = """
create table heading (start blob not null, epoch integer not null, marked integer not null, chain blob not null) strict
"""
_TRIES, _AGAIN_S = 20, 0.05  # to read a file without locks while it is written
_INSERT = "insert into entry values (?, ?, ?, ?, ?, ?)"
_COLUMNS = "select seq, at, event, decision, epoch, chain from entry"


class SqliteJournal:
    def __init__(
        self,
        path: Path,
        *,
        read_only: bool = False,
        mark_path: Path | None = None,
        cipher: LocalEnvCipher | None = None,
        shared: bool = False,
        check_lease: Callable[[], None] = no_lease,
    ) -> None:
        """Open the journal. With `mark_path`, lost entries are detected; with `cipher`, environments are encrypted.
        Raises JournalError. A writer needs `shared` if other hosts see the file. `check_lease` is called before every
        write, and raises if this writer may not write any more."""
        self._path, self._cipher = path, cipher
        self._read_only, self._shared = read_only, shared
        self._check_lease = check_lease
        self._mark_path = mark_path
        self._epoch = 0  # of the writer: how many have opened it so far
        self.lost: Lost | None = None  # what was written once and is not there any more
        self.doubt = ""  # why nobody knows whether something was lost
        self._start = self._chain = b""
        self._marked = False
        self._damaged = 0  # from which entry on it was, 0: it was not
        self._format = FORMAT
        self._mark = HighWaterMark(start=b"", epoch=0)
        self._marking: MarkFile | None = None
        # Before the entries are read, for whoever writes it writes entries first.
        self._found = high_water_mark.read_mark(mark_path) if mark_path else high_water_mark.MarkReading()
        self.alive_at = high_water_mark.read_sign_of_life(mark_path) if mark_path else 0.0  # of the writer before
        self._finish_rebuilding()
        self._db = self._connect()
        for left in range(self._retries, -1, -1):
            try:
                self._open_entries()
                break
            except (sqlite3.Error, msgspec.DecodeError, OSError, UnicodeDecodeError, MemoryError, JournalError) as e:
                if not left:
                    self._db.close()
                    raise e if isinstance(e, JournalError) else self._make_error(e) from None
                self._connect_again(left)

    def _finish_rebuilding(self) -> None:
        if self._read_only:
            return
        self._check_lease()
        try:
            self._take_rebuilt()
        except OSError as e:
            raise self._make_error(e) from None

    @property
    def epoch(self) -> int:
        """Return this writer's epoch, for a caller about to act. Raise LeaseLostError if it may not act any more."""
        if not self._read_only:
            self._check_lease()
        return self._epoch

    def _connect(self) -> sqlite3.Connection:
        self._version = sqlite_file.version_without_log(self._path) if self._read_only else ()  # before it is opened
        if self._read_only:
            return sqlite_file.open_to_read(self._path)
        return sqlite_file.open_to_write(self._path, shared=self._shared)

    @property
    def _retries(self) -> int:
        """Return how often to look again at pages that do not fit together."""
        return _TRIES if self._read_only and sqlite_file.is_shared_now(self._path) else 0

    def _connect_again(self, left: int) -> None:
        """Open the file anew, since a connection without locks does not see what changes. The last one is to a copy."""
        self._db.close()
        if left > 1:
            time.sleep(_AGAIN_S)
            self._db = self._connect()
            return
        try:
            self._db = sqlite_file.open_copy(self._path)
        except (OSError, sqlite3.Error) as e:
            raise self._make_error(e) from None

    def _open_entries(self) -> None:
        if self._read_only:
            self._read_heading()
            self._compare_with_mark()
            return
        known = self._found.mark
        try:
            self._prepare_tables()
        except sqlite3.DatabaseError as e:
            if not sqlite_file.is_corrupt(e) or known is None or not known.seq:
                raise
            self._start, self._epoch = known.start, known.epoch
            self._set_aside(1)
        self._next_epoch(self._repair_end())

    def _prepare_tables(self) -> None:
        sqlite_file.set_modes(self._db, shared=self._shared)
        self._db.execute("begin immediate")
        if not self._db.execute("select count(*) from sqlite_schema").fetchone()[0]:
            self._db.execute(_ENTRY)
            self._write_heading(os.urandom(START_BYTES), 0)
        elif self._check_format() == 1:
            start = os.urandom(START_BYTES)
            format1_reader.convert_entries(self._db, _ENTRY, start)
            self._write_heading(start, 1)
        self._db.execute("commit")
        self._read_heading()

    def _write_heading(self, start: bytes, epoch: int) -> None:
        self._db.execute(_HEADING)
        self._db.execute(
            "insert into heading values (?, ?, 0, ?)", (start, epoch, heading_checksum(start, epoch, False))
        )
        self._db.execute(f"pragma user_version = {FORMAT}")

    def _check_format(self) -> int:
        self._format = self._db.execute("pragma user_version").fetchone()[0]
        if self._format not in (1, FORMAT):
            raise sqlite3.DatabaseError(f"its format is {self._format}, this holdfast reads {FORMAT}")
        return self._format

    def _read_heading(self) -> None:
        self._check_format()
        if self._format == 1:
            return
        for start, epoch, marked, chain in self._db.execute("select start, epoch, marked, chain from heading"):
            if (
                isinstance(start, bytes)
                and isinstance(epoch, int)
                and chain == heading_checksum(start, epoch, bool(marked))
            ):
                self._start, self._epoch, self._marked = start, epoch, bool(marked)
                return
        if self._found.mark is None:
            raise sqlite3.DatabaseError("its heading is damaged")
        self._start, self._epoch, self._marked = self._found.mark.start, self._found.mark.epoch, True

    # --- what became of what was written -----------------------------------------------------------------------

    def _compare_with_mark(self) -> None:
        """Set `lost` if the mark is beyond the last entry, `doubt` if there is no mark; for read-only journals."""
        known, [(kept,)] = self._found.mark, self._db.execute("select coalesce(max(seq), 0) from entry")
        if known and known.seq > kept:
            self.lost = self._describe_loss(kept, known.seq, damaged=False)
        elif known is None and self._mark_path and kept:
            self.doubt = high_water_mark.describe_absence(self._mark_path, self._found, self._not_known(kept))

    def _repair_end(self) -> JournalRow | None:
        """Set aside the first damaged entry and all later ones, and return the last entry that is left. Set `lost` if
        entries are missing, or `doubt` if nobody can know."""
        last, damaged = self._last_sound()
        if damaged:
            self._set_aside(damaged)
        damaged = self._damaged
        kept, known = last.seq if last else 0, self._found.mark
        if damaged or (known and self._has_lost(known, kept)):
            self.lost = self._describe_loss(kept, max(damaged, known.seq if known else 0), damaged=bool(damaged))
        elif known and known.seq and known.start != self._start:
            self.doubt = f"{self._mark_path} belongs to another journal{self._not_known(kept)}"
        elif self._mark_path and (self._found.damaged or (self._marked and not self._found.there)):
            self.doubt = high_water_mark.describe_absence(self._mark_path, self._found, self._not_known(kept))
        return last

    def _has_lost(self, known: HighWaterMark, kept: int) -> bool:
        """Return whether an entry up to the mark is missing or changed. A mark of another journal tells only one thing:
        entries are missing if that journal had some and this one is empty."""
        if known.start != self._start:
            return known.seq > 0 and kept == 0
        return known.seq > kept or (known.seq > 0 and not self._agrees_with_mark(known))

    def _not_known(self, kept: int) -> str:
        return f": the journal may have lost entries after {kept:,}"

    def _describe_loss(self, kept: int, of: int, *, damaged: bool) -> Lost:
        known = self._found.mark
        if known is None:
            return Lost(kept=kept, of=of, damaged=damaged)
        generation, release, phase = known.generation, known.release, known.phase
        return Lost(kept=kept, of=of, damaged=damaged, generation=generation, release=release, phase=phase)

    def _last_sound(self) -> tuple[JournalRow | None, int]:
        """Return the last row before the first damaged one, and the damaged row's number; 0 if no row is damaged."""
        last: JournalRow | None = None
        try:
            for row in self._read_rows():
                seq, chain = (last.seq, last.chain) if last else (0, self._start)
                if row is None or not row.is_next_of(seq, chain):
                    return last, seq + 1
                last = row
        except sqlite3.DatabaseError as e:
            if not sqlite_file.is_corrupt(e):
                raise
            return last, (last.seq if last else 0) + 1
        return last, 0

    def _agrees_with_mark(self, known: HighWaterMark) -> bool:
        found = self._db.execute("select chain from entry where seq = ?", (known.seq,)).fetchone()
        return found is not None and found[0] == known.chain

    def _set_aside(self, seq: int) -> None:
        """Copy the damaged files for inspection, and rebuild the journal from the entries before number `seq`. At
        every moment one of both is whole on disk."""
        rows = [row for row in islice(self._read_rows(), seq - 1) if row] if seq > 1 else []
        for suffix in ("", "-wal", "-journal"):
            found = self._path.with_name(self._path.name + suffix)
            if found.exists():
                sqlite_file.copy_durably(found, found.with_name(f"damaged-{self._epoch}-{found.name}"))
        start, epoch = self._start, self._epoch
        part = self._path.with_name(f"{self._path.name}.part")
        sqlite_file.make_private(part, anew=True)
        self._db.close()
        self._db = sqlite3.connect(part, isolation_level=None)
        self._db.execute("pragma synchronous = full")
        self._db.execute("begin immediate")
        self._db.execute(_ENTRY)
        self._write_heading(start, epoch)
        self._db.executemany(_INSERT, (msgspec.structs.astuple(row) for row in rows))
        self._db.execute("commit")
        self._db.close()
        part.replace(self._rebuilt_path)
        sqlite_file.sync_folder(self._path.parent)
        self._take_rebuilt()
        self._db = self._connect()
        sqlite_file.set_modes(self._db, shared=self._shared)
        self._damaged = seq

    @property
    def _rebuilt_path(self) -> Path:
        return self._path.with_name(f"{self._path.name}.rebuilt")

    def _take_rebuilt(self) -> None:
        """Put a rebuilt journal in the place of the damaged one, if there is one. The log of the damaged one goes
        first, or SQLite would apply it to the other. A power cut in between is made good by the next writer."""
        if not self._rebuilt_path.exists():
            return
        for suffix in ("-wal", "-shm", "-journal"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        sqlite_file.sync_folder(self._path.parent)
        self._rebuilt_path.replace(self._path)
        sqlite_file.sync_folder(self._path.parent)

    def _next_epoch(self, last: JournalRow | None) -> None:
        """Begin the next epoch, and write it to the database file itself, not only to SQLite's write-ahead log."""
        known = self._found.mark
        self.raise_epoch(max(self._epoch, known.epoch if known else 0, last.epoch if last else 0) + 1)
        self._chain = last.chain if last else self._start
        self._mark = HighWaterMark(start=self._start, epoch=self._epoch, seq=last.seq if last else 0, chain=self._chain)
        if self._mark_path is None:
            return
        if known:
            generation, release, phase = known.generation, known.release, known.phase
            self._mark = msgspec.structs.replace(self._mark, generation=generation, release=release, phase=phase)
        else:
            for entry in self.read():
                self._mark = _advance_mark(self._mark, entry)
        # A loss stays marked until an entry tells of it: whoever dies before that is followed by one who knows, too.
        missed = {"seq": self.lost.of, "chain": b""} if self.lost else {}
        self._marking = MarkFile(self._mark_path, msgspec.structs.replace(self._mark, **missed))

    def raise_epoch(self, epoch: int) -> None:
        """Set and store the epoch, for example one above an epoch that agents know but this journal has lost."""
        self._check_lease()
        self._epoch, marked = epoch, bool(self._marked or self._mark_path)
        self.flush()
        chain = heading_checksum(self._start, epoch, marked)
        try:
            self._db.execute("begin immediate")
            self._db.execute("delete from heading")
            self._db.execute("insert into heading values (?, ?, ?, ?)", (self._start, epoch, int(marked), chain))
            self._db.execute("commit")
            self._db.execute("pragma wal_checkpoint(passive)").fetchall()
        except sqlite3.Error as e:
            raise self._make_error(e) from None

    # --- entries -----------------------------------------------------------------------------------------------

    def append(self, entry: Entry, durable: bool) -> None:
        self._check_lease()
        row = make_row(entry, self._epoch, self._chain, self._cipher)
        try:
            # Rows that no action depends on gather in an open transaction; the next durable one takes them along.
            if not self._db.in_transaction:
                self._db.execute("begin immediate")
            self._db.execute(_INSERT, msgspec.structs.astuple(row))
            self._chain = row.chain
            self._mark = msgspec.structs.replace(
                _advance_mark(self._mark, entry), epoch=self._epoch, seq=row.seq, chain=row.chain
            )
            if durable:
                self.flush()
        except sqlite3.IntegrityError:
            raise JournalError(f"{self._path} has an entry {entry.seq} already: another process writes to it") from None
        except sqlite3.Error as e:
            raise self._make_error(e) from None

    def flush(self) -> None:
        """Commit all appended entries, so that readers see them."""
        self._check_lease()
        try:
            if self._db.in_transaction:
                self._db.execute("commit")
                if self._marking:
                    self._marking.write_mark(self._mark)
            if self._marking:
                self._marking.touch_file()
        except sqlite3.Error as e:
            raise self._make_error(e) from None

    def read(self, after: int = 0) -> Iterator[Entry]:
        after = min(max(after, 0), _MOST)
        if self._retries or (self._version and self._version != sqlite_file.version_without_log(self._path)):
            self._db.close()
            self._db = self._connect()
        for left in range(self._retries, -1, -1):
            try:
                for entry in self._read_once(after):
                    after = entry.seq
                    yield entry
                return
            except JournalError:
                if not left:
                    raise
                self._connect_again(left)

    def _read_once(self, after: int) -> Iterator[Entry]:
        try:
            if self._format == 1:
                yield from format1_reader.read_entries(self._db, after)
                return
            seq, chain = self._link_before(after)
            for row in self._read_rows(after):
                if row is None or not row.is_next_of(seq, chain):
                    raise JournalDamagedError(f"{self._path} is damaged: entry {seq + 1} is not as it was written")
                seq, chain = row.seq, row.chain
                yield self._decode(row)
        except (sqlite3.Error, msgspec.DecodeError, UnicodeDecodeError, MemoryError, TypeError, RecursionError) as e:
            raise self._make_error(e) from None

    def _decode(self, row: JournalRow) -> Entry:
        if cipher := self._cipher:
            event, decision = cipher.decrypt_env(row.event), cipher.decrypt_env(row.decision)
            row = msgspec.structs.replace(row, event=event, decision=decision)
        return row.entry

    def _link_before(self, after: int) -> tuple[int, bytes]:
        found = self._db.execute("select chain from entry where seq = ?", (after,)).fetchone() if after else None
        return (after, found[0]) if found else (after, self._start)

    def _read_rows(self, after: int = 0) -> Iterator[JournalRow | None]:
        where = f"{_COLUMNS} where seq > ? order by seq" if after else f"{_COLUMNS} order by seq"
        for values in self._db.execute(where, (after,) if after else ()):
            yield parse_row(values)

    def close(self) -> None:
        """Flush and close. A closed journal is one plain file that can also be read from read-only storage."""
        try:
            self.flush()
        finally:
            if self._marking:
                self._marking.close()
                self._marking = None
            if not self._read_only and not self._shared:
                with contextlib.suppress(sqlite3.OperationalError):  # somebody reads it just now: it keeps its log
                    self._db.execute("pragma busy_timeout = 0")
                    self._db.execute("pragma journal_mode = delete")
            self._db.close()

    def _make_error(self, why: Exception) -> JournalError:
        return sqlite_file.make_error(self._path, why, shared=self._shared)


def _advance_mark(known: HighWaterMark, entry: Entry) -> HighWaterMark:
    """Return the high-water mark with its generation, release and phase updated from this entry."""
    launch = next((action for action in entry.decision.actions if isinstance(action, Launch)), None)
    generation, release = (launch.generation, launch.release.number) if launch else (known.generation, known.release)
    return msgspec.structs.replace(known, generation=generation, release=release, phase=entry.decision.phase)
