"""Opens a run's journal for reading, whether it is in the run directory or in Postgres."""

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.run_dirs import run_dir_secrets, run_directory
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.controller_interfaces import Journal
from holdfast.journal.local_env_cipher import LocalEnvCipher
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.wire.run_and_node_specs import RunSpec

if TYPE_CHECKING:
    from holdfast.journal.journal_key import JournalKey


class NoJournalError(UsageError):
    """The run has no journal yet."""


def open_to_read(run_dir: Path) -> Journal:
    """Open the journal for reading. Raise NoJournalError if there is none, or JournalError if it cannot be read."""
    path = run_dir / "journal.db"
    if path.exists():
        cipher = LocalEnvCipher(run_dir / run_dir_secrets.JOURNAL_KEY, writes=False)
        return SqliteJournal(path, read_only=True, mark_path=run_dir / "journal.mark", cipher=cipher)
    run = run_directory.read_spec(run_dir)
    if not run.journal:
        raise NoJournalError(f"{run_dir} has no journal yet; its controller has not started")
    from holdfast.journal.postgres_journal import PostgresJournal

    return PostgresJournal(run.journal, run.job.run_id, key=read_key(run, run_dir))


def read_key(run: RunSpec, run_dir: Path) -> "JournalKey | None":
    """Return the key of a journal in Postgres; None if this host does not know the job's secret."""
    from holdfast.journal.journal_key import JournalKey  # what it needs takes long to import

    try:
        return JournalKey(run_dir_secrets.read_door_secret(run_dir), run.job.run_id)
    except FileNotFoundError:
        return None
