"""A journal on a file system that several hosts share: no shared memory, one writer, readers without locks."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.journal import sqlite_file
from holdfast.journal.journal_errors import JournalError, JournalHeldError, LeaseLostError
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.decider_events import Tick
from holdfast.model.journal_entry import Decision, Entry
from tests.journal.test_contract import ROOT, entries, fill

_WRITE = """
import sys
from pathlib import Path
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.decider_events import Tick
from holdfast.model.journal_entry import Decision, Entry
journal = SqliteJournal(Path(sys.argv[1]), shared=True)
reason = "x" * 200
for seq in range(1, int(sys.argv[2]) + 1):
    journal.append(Entry(seq=seq, at=float(seq), event=Tick(), decision=Decision(reason=reason)), durable=seq % 3 == 0)
    if seq == 3: print("begun", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def writing(path: Path, count: int) -> Iterator["subprocess.Popen[str]"]:
    """A writer in a process of its own, which is killed at the end."""
    words = [sys.executable, "-c", _WRITE, str(path), str(count)]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


def test_it_needs_no_memory_that_hosts_share_and_neither_does_an_older_file(tmp_path: Path) -> None:
    path, written = tmp_path / "journal.db", entries()
    older = SqliteJournal(path)
    fill(older, written[:3])
    assert sqlite_file.has_log(path) and (tmp_path / "journal.db-shm").exists()
    older._db.close()  # as after a crash: its log is still there
    journal = SqliteJournal(path, shared=True)
    fill(journal, written[3:])
    names = set(os.listdir(tmp_path))
    assert names == {"journal.db", "journal.db-journal"} and sqlite_file.is_shared_now(path)
    assert list(journal.read()) == written
    journal.close()
    assert os.listdir(tmp_path) == ["journal.db"]


@pytest.mark.e2e
def test_a_second_writer_is_held_off_and_gets_it_when_the_first_has_died(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with writing(path, 3), pytest.raises(JournalHeldError, match=r"journal\.db "):
        SqliteJournal(path, shared=True)
    journal = SqliteJournal(path, shared=True)
    assert (len(list(journal.read())), journal.epoch) == (3, 2)
    journal.close()


@pytest.mark.e2e
def test_what_is_read_while_it_is_written_has_no_gaps_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    counts = [0]
    with writing(path, 600), contextlib.closing(SqliteJournal(path, read_only=True)) as reader:
        while counts[-1] < 500:
            found = [entry.seq for entry in reader.read()]
            assert found == list(range(1, len(found) + 1))
            counts.append(len(found))
            with contextlib.closing(SqliteJournal(path, read_only=True)) as other:
                more = [entry.seq for entry in other.read(after=max(0, len(found) - 5))]
            assert more[: len(found[-5:])] == found[-5:]
    assert counts == sorted(counts) and len(set(counts)) > 3, counts


@pytest.mark.e2e
def test_a_writer_that_died_amid_a_change_leaves_what_was_durable_to_readers_and_to_the_next_writer(
    tmp_path: Path,
) -> None:
    """SQLite has written some pages of a transaction to the file, and its journal knows what they were."""
    path = tmp_path / "journal.db"
    body = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom holdfast.journal.sqlite_journal import SqliteJournal\n"
        "from holdfast.model.decider_events import Tick\nfrom holdfast.model.journal_entry import Decision, Entry\n"
        "journal = SqliteJournal(Path(sys.argv[1]), shared=True)\n"
        "for seq in range(1, 31):\n"
        "    entry = Entry(seq=seq, at=1.0, event=Tick(), decision=Decision(reason='y' * 3000))\n"
        "    journal.append(entry, durable=True)\n"
        "journal._db.execute('pragma cache_spill = on'); journal._db.execute('pragma cache_size = 1')\n"
        "journal._db.execute('begin immediate')\n"
        "journal._db.execute('update entry set decision = zeroblob(3000)')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", body, str(path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL and sqlite_file.is_shared_now(path)
    torn = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    assert torn.execute("select count(*) from entry where decision = zeroblob(3000)").fetchone()[0] > 0
    torn.close()
    before = path.read_bytes()
    reader = SqliteJournal(path, read_only=True)
    assert [entry.seq for entry in reader.read()] == list(range(1, 31))
    reader.close()
    assert path.read_bytes() == before, "who reads changes nothing"
    journal = SqliteJournal(path, shared=True)
    assert [entry.seq for entry in journal.read()] == list(range(1, 31)) and not journal.lost
    journal.close()


def test_damage_is_damage_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = SqliteJournal(path, shared=True)
    fill(journal, entries()[:6])
    journal._db.execute("update entry set at = at + 1 where seq = 4")
    reader = SqliteJournal(path, read_only=True)
    with pytest.raises(JournalError, match="entry 4"):
        list(reader.read())
    reader.close()
    journal._db.close()


def test_a_writer_without_its_lease_neither_acts_nor_writes(tmp_path: Path) -> None:
    lost = False

    def check() -> None:
        if lost:
            raise LeaseLostError("another has it")

    path = tmp_path / "journal.db"
    journal = SqliteJournal(path, shared=True, check_lease=check)
    first, second = (Entry(seq=seq, at=1.0, event=Tick(), decision=Decision()) for seq in (1, 2))
    journal.append(first, durable=False)
    lost = True
    for write in (
        lambda: journal.append(second, durable=True),
        journal.flush,
        lambda: journal.raise_epoch(9),
        lambda: journal.epoch,
        journal.close,
    ):
        with pytest.raises(LeaseLostError):
            write()
    again = SqliteJournal(path, shared=True)
    assert (list(again.read()), again.epoch) == ([], 2), "nothing of it is there, and nobody locks it"
    again.close()
