"""The mark: how far the journal got, outside of it; whole or noticed as damaged, and for its owner alone."""

import errno
import os
import stat
from pathlib import Path

import pytest

from holdfast.journal import high_water_mark
from holdfast.journal.high_water_mark import HighWaterMark, MarkFile
from holdfast.journal.journal_errors import JournalError, JournalFullError
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.action import Launch
from holdfast.model.job_phase import Phase
from tests.cli.driver import until
from tests.journal.torn import entries, opened, write

MARK = HighWaterMark(start=b"s" * 16, epoch=1)


def marks(count: int) -> list[HighWaterMark]:
    return [HighWaterMark(start=b"s" * 16, epoch=1, seq=seq, chain=bytes([seq] * 16)) for seq in range(1, count + 1)]


def test_the_newest_is_found(tmp_path: Path) -> None:
    path = tmp_path / "journal.mark"
    assert high_water_mark.read_mark(path) == high_water_mark.MarkReading()
    file = MarkFile(path, MARK)
    assert high_water_mark.read_mark(path) == high_water_mark.MarkReading(mark=MARK, there=True)
    for one in marks(5):
        file.write_mark(one)
        assert high_water_mark.read_mark(path) == high_water_mark.MarkReading(mark=one, there=True)
    file.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["journal.mark"]


def test_a_torn_half_leaves_the_other_and_is_told(tmp_path: Path) -> None:
    path = tmp_path / "journal.mark"
    file = MarkFile(path, MARK)
    *_, last, newest = marks(4)
    for one in marks(4):
        file.write_mark(one)
    file.close()
    content = path.read_bytes()
    path.write_bytes(b"x" + content[1:])  # the fourth was written there
    assert high_water_mark.read_mark(path) == high_water_mark.MarkReading(mark=last, there=True, damaged=True)
    path.write_bytes(bytes(512) + content[512:])
    assert high_water_mark.read_mark(path) == high_water_mark.MarkReading(mark=last, there=True, damaged=True)
    path.write_bytes(content[:512] + bytes(512))
    assert high_water_mark.read_mark(path) == high_water_mark.MarkReading(mark=newest, there=True, damaged=True)
    path.write_bytes(b"")
    assert high_water_mark.read_mark(path) == high_water_mark.MarkReading(there=True, damaged=True)


def test_syncs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One a second, however often the journal is flushed, and one more when the job stands otherwise."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    file = MarkFile(tmp_path / "journal.mark", MARK)
    for number, one in enumerate(marks(200)):
        now[0] = 100.0 + 0.01 * number
        file.write_mark(one)
    assert len(synced) == 1
    file.write_mark(HighWaterMark(start=b"s" * 16, epoch=1, seq=201, generation=1, phase=Phase.LAUNCHING))
    assert len(synced) == 2
    file.close()


def test_a_full_disk_and_other_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = MarkFile(tmp_path / "journal.mark", MARK)

    def fails(error: OSError) -> None:
        def pwrite(fd: int, content: bytes, at: int) -> int:
            raise error

        monkeypatch.setattr(os, "pwrite", pwrite)

    fails(OSError(28, "No space left on device"))
    with pytest.raises(JournalFullError, match=r"journal\.mark "):
        file.write_mark(MARK)
    with pytest.raises(JournalFullError):
        MarkFile(tmp_path / "other.mark", MARK)
    assert [p.name for p in tmp_path.iterdir()] == ["journal.mark"]
    fails(OSError(5, "Input/output error"))
    with pytest.raises(JournalError, match=rf"journal\.mark .*{os.strerror(errno.EIO)}$"):
        file.write_mark(MARK)


def test_it_follows_what_is_on_disk(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    known = high_water_mark.read_mark(tmp_path / "journal.mark").mark
    assert known and (known.seq, known.epoch, known.phase) == (0, 1, Phase.NEW)
    for entry in entries():
        journal.append(entry, durable=bool(entry.decision.actions))
        known = high_water_mark.read_mark(tmp_path / "journal.mark").mark
        assert known and (known.seq == entry.seq or not entry.decision.actions)
    journal.flush()
    known = high_water_mark.read_mark(tmp_path / "journal.mark").mark
    launched = [a.generation for e in entries() for a in e.decision.actions if isinstance(a, Launch)]
    assert known and (known.seq, known.generation, known.phase) == (300, launched[-1], entries()[-1].decision.phase)
    journal.close()


def test_a_reader_knows_what_is_missing_and_mends_nothing(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    write(journal, entries()[:50])
    journal.close()
    (tmp_path / "journal.db").unlink()
    short = SqliteJournal(tmp_path / "journal.db")
    for entry in entries()[:20]:
        short.append(entry, durable=False)
    short.close()
    before = (tmp_path / "journal.mark").read_bytes()
    reader = SqliteJournal(tmp_path / "journal.db", read_only=True, mark_path=tmp_path / "journal.mark")
    assert reader.lost and (reader.lost.kept, reader.lost.of) == (20, 50)
    reader.close()
    assert (tmp_path / "journal.mark").read_bytes() == before


def test_one_that_is_gone_is_missed(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "journal.mark").unlink()
    journal = opened(tmp_path)
    assert journal.doubt.startswith(f"{tmp_path / 'journal.mark'} ") and " 0" in journal.doubt
    journal.close()
    journal = opened(tmp_path)
    assert (journal.doubt, journal.epoch) == ("", 3)
    journal.close()


def test_one_of_another_journal_is_not_believed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        journal = opened(tmp_path / name)
        write(journal, entries()[:10])
        journal.close()
    (tmp_path / "a" / "journal.mark").replace(tmp_path / "b" / "journal.mark")
    journal = opened(tmp_path / "b")
    assert journal.doubt.startswith(f"{tmp_path / 'b' / 'journal.mark'} ") and journal.lost is None
    journal.close()


def test_the_next_writer_knows_until_when_this_one_lived(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    assert journal.alive_at == 0.0, "there was none before"
    mark = tmp_path / "journal.mark"
    os.utime(mark, (1.0, 1.0))

    def touched() -> bool:
        journal.flush()  # it has nothing to write
        return mark.stat().st_mtime > 1.0

    until(touched, "a sign of life")
    journal.close()
    os.utime(mark, (2.0, 2.0))
    after = opened(tmp_path)
    assert after.alive_at == 2.0
    after.close()
