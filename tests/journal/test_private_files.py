"""What a journal leaves on disk is for its owner alone."""

import contextlib
import sqlite3
from pathlib import Path

from tests.journal.torn import entries, opened, write


def test_nobody_else_reads_a_journal_and_what_is_kept_of_a_damaged_one(tmp_path: Path) -> None:
    """Its folder is for its owner alone as well, unless somebody opens that to others."""
    journal = opened(tmp_path)
    write(journal, entries()[:20])
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert {"journal.db", "journal.db-wal", "journal.db-shm", "journal.mark"} <= modes.keys()
    assert {*modes.values()} == {0o600}
    journal.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as db, db:
        db.execute("update entry set event = x'00' where seq = 10")
    again = opened(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert any(name.startswith("damaged-") for name in modes), "nothing was harmed"
    assert {*modes.values()} == {0o600}
    again.close()
