"""Opens the journal of a run to read it, wherever it is: in the run directory or in Postgres."""

from pathlib import Path

from holdfast.cli.run_dirs import run_directory
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.ports import Journal


class NoJournalError(UsageError):
    """The run has no journal yet."""


def open_to_read(run_dir: Path) -> Journal:
    """Open the journal. NoJournalError if there is none yet, JournalError if it cannot be read."""
    path = run_dir / "journal.db"
    if path.exists():
        return SqliteJournal(path, read_only=True, mark_path=run_dir / "journal.mark")
    run = run_directory.read_spec(run_dir)
    if not run.journal:
        raise NoJournalError(f"{run_dir} has no journal yet; its controller has not started")
    from holdfast.journal.postgres_journal import PostgresJournal

    return PostgresJournal(run.journal, run.job.run_id)
