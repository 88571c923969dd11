"""`holdfast ckpt ls --journal`: which checkpoints runs have, as the database of their journals knows."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from holdfast.checkpoint.manifest import Author
from holdfast.checkpoint.stored_checkpoints import StoredCheckpoint
from holdfast.cli.run_dirs.journal_database_connection import open_database

if TYPE_CHECKING:
    from holdfast.journal.checkpoint_table import CheckpointRow


def read_table(url: str, run_id: str | None) -> "list[CheckpointRow]":
    """Return the rows of one run, or of all. UsageError or JournalError if the database cannot be asked."""
    with open_database(url, "--journal ") as link:
        from holdfast.journal import checkpoint_table, postgres_schema

        postgres_schema.require_schema(link)
        return checkpoint_table.list_checkpoints(link, run_id)


def stored_of(row: "CheckpointRow") -> StoredCheckpoint:
    """Return the row as `holdfast ckpt ls` finds a checkpoint on storage."""
    return StoredCheckpoint(
        step=row.step,
        url=row.place,
        ok=not (row.doubted or row.why),
        why=row.why or ("written apart, as it is in doubt" if row.doubted else ""),
        doubted=row.doubted,
        at=row.written_at.timestamp() if row.written_at else 0.0,
        author=Author(row.generation or 0, row.author),
        world=row.ranks or 0,
        bytes=row.bytes or 0,
    )


def local_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
