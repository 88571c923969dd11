"""A journal of the first format, as the version before the second wrote it."""

import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest

from holdfast.controller.decider_rebuild import rebuild_decider
from holdfast.core.decide.decider import Decider
from holdfast.journal.journal_errors import JournalError
from holdfast.journal.sqlite_journal import FORMAT, SqliteJournal
from holdfast.model.action import Dismiss, Dismissal, Say
from holdfast.model.decider_events import Successor
from holdfast.model.detector_alarm import Alarm
from holdfast.model.journal_entry import Entry
from tests.journal import test_contract

OLD = Path(__file__).parent / "old" / "format-1.db"


def entries() -> list[Entry]:
    """As of today, but that alarms did not name the exception yet, nor their class in words."""
    before = (
        msgspec.structs.replace(one, event=msgspec.structs.replace(one.event, raised="", title=""))
        if isinstance(one.event, Alarm)
        else one
        for one in test_contract.entries()
    )
    return list(before)


def plain(told: list[Entry]) -> list[tuple[object, ...]]:
    """Entries without wording, which differs between versions, and without why a node is given back: they lack it."""
    acts = (
        [
            msgspec.structs.replace(action, cause=Dismissal.UNTOLD) if isinstance(action, Dismiss) else action
            for action in one.decision.actions
            if not isinstance(action, Say)
        ]
        for one in told
    )
    return [(one.seq, one.at, one.event, one.decision.phase, done) for one, done in zip(told, acts, strict=True)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(OLD, tmp_path / "journal.db"))


def version(path: Path) -> int:
    with sqlite3.connect(path) as db:
        found: int = db.execute("pragma user_version").fetchone()[0]
    db.close()
    return found


def test_it_is_read_as_it_is(path: Path) -> None:
    assert version(path) == 1
    before = path.read_bytes()
    reader = SqliteJournal(path, read_only=True, mark_path=path.with_name("journal.mark"))
    assert plain(list(reader.read())) == plain(entries())
    assert plain(list(reader.read(after=5))) == plain(entries()[5:])
    assert reader.lost is None
    reader.close()
    assert path.read_bytes() == before


def test_a_writer_makes_it_the_second_format_and_goes_on(path: Path) -> None:
    journal = SqliteJournal(path, mark_path=path.with_name("journal.mark"))
    assert (journal.epoch, journal.lost, journal.doubt) == (2, None, "")
    decider = Decider()
    written = list(rebuild_decider(journal, decider))
    assert plain(written) == plain(entries())
    last = written[-1]
    event = Successor(epoch=journal.epoch)
    step = decider.step(last.at, event)
    journal.append(type(last)(seq=last.seq + 1, at=last.at, event=event, decision=step), durable=True)
    journal.close()
    assert version(path) == FORMAT == 2
    again = SqliteJournal(path, mark_path=path.with_name("journal.mark"))
    assert (again.epoch, again.lost, again.doubt) == (3, None, "")
    assert len(list(rebuild_decider(again, Decider()))) == len(written) + 1
    again.close()


def test_one_that_cannot_be_read_is_left_as_it_was(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("update entry set event = ? where seq = 3", (b'{"type":"comet"}',))
    db.close()
    with pytest.raises(JournalError, match="comet"):
        SqliteJournal(path)
    assert version(path) == 1
