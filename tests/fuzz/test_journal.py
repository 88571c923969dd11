"""A journal whose rows or whose file are damaged: read up to there, and refused in one sentence."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.journal.journal_errors import JournalError
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.decider_events import Tick
from holdfast.model.journal_entry import Decision, Entry
from tests.fuzz.making import hostile, narrow


def _whole(path: Path) -> bytes:
    path.unlink(missing_ok=True)
    journal = SqliteJournal(path)
    for seq in range(1, 4):
        journal.append(Entry(seq=seq, at=float(seq), event=Tick(), decision=Decision()), durable=True)
    journal.close()
    return path.read_bytes()


def _read(path: Path, after: int = 0) -> list[Entry]:
    journal = SqliteJournal(path, read_only=True)
    try:
        return list(journal.read(after))
    finally:
        journal.close()


@given(data=st.data())
def test_a_damaged_file(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    damaged = data.draw(hostile(st.just(_whole(path))))
    path.write_bytes(damaged)
    narrow(lambda: _read(path), JournalError)


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    """One byte before the words of a row is damaged, and what was a blob is nothing, or a number."""
    path = tmp_path / "journal.db"
    whole = _whole(path)
    at = whole.index(b"tick")
    for before in range(1, 32):
        path.write_bytes(whole[: at - before] + b"\0" + whole[at - before + 1 :])
        narrow(lambda: _read(path), JournalError)


@pytest.mark.parametrize("words", [b"ti\xffk", b"[[[[", b"1e99", b'"}  '], ids=["not UTF-8", "deep", "large", "short"])
def test_damaged_words(words: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(_whole(path).replace(b"tick", words))
    narrow(lambda: _read(path), JournalError)


@given(after=st.sampled_from((0, -1, 2**63 - 1, 2**63, -(2**63) - 1, 10**400)))
@example(after=10**400)
def test_any_place_to_read_from(after: int, tmp_path: Path) -> None:
    _whole(tmp_path / "journal.db")
    found = _read(tmp_path / "journal.db", after)
    assert len(found) == (3 if after <= 0 else 0)
