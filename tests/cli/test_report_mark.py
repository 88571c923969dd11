"""`holdfast report` of a journal whose mark cannot tell whether its end is missing."""

from pathlib import Path

import pytest

from holdfast.cli.commands import report_command
from holdfast.journal.sqlite_journal import SqliteJournal
from tests.cli.test_report_command import run_dir as run_dir
from tests.core.test_ledger import Book


@pytest.mark.parametrize("whose", ["gone", "damaged"])
def test_a_journal_without_a_mark_may_have_lost_its_end(
    whose: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = run_dir / "journal.mark"
    written = SqliteJournal(run_dir / "journal.db", mark_path=mark)
    for entry in Book().trains().entries[:5]:
        written.append(entry, durable=True)
    written.close()
    mark.unlink() if whose == "gone" else mark.write_bytes(bytes(3))
    report_command.load_report(run_dir)
    said = capsys.readouterr().err
    after = "the journal may have lost entries after 5"
    assert said == f"holdfast report: {mark} is {whose}: {after}; nobody can know\n"
