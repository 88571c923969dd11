"""Opens the place where a controller writes what its successor needs: the run directory, or Postgres."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli.run_dirs import run_dir_creation, run_dir_secrets, run_journal
from holdfast.controller_interfaces import CheckpointTable, Journal, Notes
from holdfast.journal.journal_errors import JournalError
from holdfast.journal.lease_term import no_lease
from holdfast.journal.local_env_cipher import LocalEnvCipher
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.run_and_node_specs import RunSpec

if TYPE_CHECKING:
    from holdfast.cli.launch.run_handover import HandoverNotes


class NotesFolder:
    """Notes for the next controller, kept as files in the run directory."""

    def __init__(self, run_dir: Path, check_lease: Callable[[], None] = no_lease) -> None:
        """`check_lease` is called before every note, and raises if this controller may not write any more."""
        self._dir, self._check_lease = run_dir, check_lease

    def put_note(self, name: str, content: bytes) -> None:
        self._check_lease()
        mutual_tls.write_secret(self._dir / name, content, durable=True)  # it counts after a loss of power, too

    def get_note(self, name: str) -> bytes:
        path = self._dir / name
        return path.read_bytes() if path.exists() else b""


class RunRecord(NamedTuple):
    """The journal and the notes that one controller writes for its successor."""

    journal: Journal
    notes: Notes
    checkpoints: CheckpointTable | None
    handover: "HandoverNotes | None"  # None: the next controller is on the same host

    async def hand_over(self) -> None:
        """Save again and again what a controller on another host would need. Return at once if none can take over."""
        if self.handover:
            await self.handover.run()

    def put_keys(self) -> None:
        """Save keys, tokens and certificate serials for a controller on another host, before any node gets them."""
        if self.handover:
            self.handover.put_keys()

    def forget_keys(self) -> None:
        """Remove the keys from the notes for another host, because the run has ended."""
        if self.handover:
            self.handover.forget_keys()


def open_record(
    run: RunSpec, run_dir: Path, holder: str, say: Callable[[str], None], check_lease: Callable[[], None]
) -> RunRecord:
    """Open the journal for writing: in the run directory, or in Postgres as the holder of the run's lease. Raise
    JournalHeldError if another controller has the file open. `check_lease` is for a run directory whose lease is held
    elsewhere."""
    if not run.journal:
        journal = SqliteJournal(
            run_dir / "journal.db",
            mark_path=run_dir / "journal.mark",
            cipher=LocalEnvCipher(run_dir / run_dir_secrets.JOURNAL_KEY, writes=True),
            shared=run_dir_creation.is_shared(run, run_dir),
            check_lease=check_lease,
        )
        return RunRecord(journal, NotesFolder(run_dir, check_lease), None, None)
    from holdfast.cli.launch.run_handover import HandoverNotes
    from holdfast.journal.postgres_journal import LeaseHolder, PostgresJournal

    address = f"{run.host}:{run.port}"
    if (key := run_journal.read_key(run, run_dir)) is None:
        older = "as in runs with certificates of older versions: go on with the version that began it"
        raise JournalError(f"{run_dir} lacks the secret by which the journal in {run.journal} is proved, {older}")
    lease = LeaseHolder(name=holder, address=address)
    record = PostgresJournal(run.journal, run.job.run_id, lease, key, adopts=not run.proven)
    handover = HandoverNotes(record, run_dir, say)
    handover.put_keys()  # before any node can join
    return RunRecord(record, record, record, handover)
