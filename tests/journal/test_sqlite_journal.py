"""What is SQLite's own: files that are no journals, and what is left of one that is closed."""

import re
import sqlite3
from pathlib import Path

import msgspec
import pytest

from holdfast.journal import entry_chain
from holdfast.journal.journal_errors import JournalError, JournalFullError
from holdfast.journal.sqlite_journal import FORMAT, SqliteJournal
from holdfast.model.decider_events import Tick
from holdfast.model.journal_entry import Decision, Entry

ENTRY = Entry(seq=1, at=1.0, event=Tick(), decision=Decision())


def refused(path: Path, *, read_only: bool = False) -> str:
    with pytest.raises(JournalError) as caught:
        SqliteJournal(path, read_only=read_only)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_another_format(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    SqliteJournal(path).close()
    with sqlite3.connect(path) as db:
        db.execute("pragma user_version = 7")
    db.close()
    assert re.search(rf"format is 7\b.*\b{FORMAT}$", refused(path))
    assert "format is 7" in refused(path, read_only=True)


def test_somebody_elses_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("create table theirs (a)")
    db.close()
    assert "format is 0" in refused(path)
    with sqlite3.connect(path) as db:
        assert db.execute("select name from sqlite_schema").fetchall() == [("theirs",)]
    db.close()


def test_no_database_at_all(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_text("a poem, or a log, but long enough to be looked at as a database " * 100)
    assert "not a database" in refused(path)


def test_a_directory(tmp_path: Path) -> None:
    refused(tmp_path)
    refused(tmp_path, read_only=True)


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere" / "journal.db")


def test_a_full_disk_is_told_from_other_trouble(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = SqliteJournal(path)
    journal._db.execute("pragma max_page_count = 3")  # SQLite says the same of a disk
    journal.append(ENTRY, durable=True)
    large = Entry(seq=2, at=1.0, event=Tick(), decision=Decision(reason="x" * 20_000))
    with pytest.raises(JournalFullError, match=r"journal\.db "):
        journal.append(large, durable=True)
    assert list(journal.read()) == [ENTRY], "what was written before is whole"
    journal.close()


def test_a_reader_may_not_write(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    SqliteJournal(path).close()
    reader = SqliteJournal(path, read_only=True)
    with pytest.raises(JournalError, match="readonly"):
        reader.append(ENTRY, durable=True)
    reader.close()


def test_an_entry_of_another_world_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.db"
    journal = SqliteJournal(path)
    with monkeypatch.context() as patch:
        patch.setattr(entry_chain, "_ENCODER", Foreign())
        journal.append(ENTRY, durable=True)
    journal.close()
    reader = SqliteJournal(path, read_only=True)
    with pytest.raises(JournalError, match="comet"):
        list(reader.read())
    reader.close()


class Foreign:
    """A version of holdfast that has other events."""

    def encode(self, value: object) -> bytes:
        return msgspec.msgpack.encode({"type": "comet"})


def test_a_path_with_odd_characters(tmp_path: Path) -> None:
    path = tmp_path / "a b?c#d%20é" / "journal.db"
    path.parent.mkdir()
    journal = SqliteJournal(path)
    journal.append(ENTRY, durable=True)
    journal.close()
    assert [p.name for p in path.parent.iterdir()] == ["journal.db"]


def test_a_closed_journal_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = SqliteJournal(path)
    journal.append(ENTRY, durable=False)
    journal.close()
    assert [p.name for p in tmp_path.iterdir()] == ["journal.db"]
    reader = SqliteJournal(path, read_only=True)
    assert list(reader.read()) == [ENTRY]
    reader.close()
    assert [p.name for p in tmp_path.iterdir()] == ["journal.db"]


def test_a_reader_of_a_closed_journal_sees_what_the_next_writers_write(tmp_path: Path) -> None:
    """As a page does that shows a run which is resumed."""
    path = tmp_path / "journal.db"
    SqliteJournal(path).close()
    reader = SqliteJournal(path, read_only=True)
    assert list(reader.read()) == []
    for seq in (1, 3):
        writer = SqliteJournal(path)
        for number in (seq, seq + 1):
            entry = msgspec.structs.replace(ENTRY, seq=number)
            writer.append(entry, durable=True)
            assert list(reader.read(number - 1)) == [entry]
        writer.close()
    assert [entry.seq for entry in reader.read()] == [1, 2, 3, 4]
    reader.close()


def test_closing_does_not_wait_for_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = SqliteJournal(path)
    journal.append(ENTRY, durable=True)
    reader = SqliteJournal(path, read_only=True)
    reading = reader.read()
    next(reading)
    journal.close()
    assert list(reading) == []
    reader.close()


def test_flush_shows_readers_what_is_not_durable_yet(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = SqliteJournal(path)
    reader = SqliteJournal(path, read_only=True)
    journal.append(ENTRY, durable=False)
    assert list(reader.read()) == []
    journal.flush()
    assert list(reader.read()) == [ENTRY]
    journal.close()
    reader.close()
