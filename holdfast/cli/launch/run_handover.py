"""Copies a run's keys and releases to Postgres, for a controller on another host that may take over the run."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.cli.launch.controller_lease import ControllerLease
from holdfast.cli.run_dirs import run_dir_secrets
from holdfast.decoding import from_msgpack
from holdfast.journal.journal_errors import JournalDamagedError
from holdfast.journal.journal_key import JournalKey
from holdfast.journal.postgres_journal import PostgresJournal
from holdfast.model.decider_events import Begin
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.releases import tree_archive

MOST_BYTES = 64 << 20  # of one release; a larger one is not handed over
_CHUNK = 1 << 20  # one statement is answered at once
_LOOK_S = 1.0
_DOOR, _RELEASE = "door", "release/"
_SERIALS = "nodes.json"  # of the folder of keys; the rest are keys and tokens
_SECRET = "secret"  # the successor has it already, or it is none


class HandoverNotes:
    """Copies keys and releases from the controller's run directory to Postgres, for a controller on another host."""

    def __init__(self, journal: PostgresJournal, run_dir: Path, say: Callable[[str], None]) -> None:
        self._journal, self._run_dir, self._say = journal, run_dir, say
        self._files: dict[str, bytes] = {}  # as they were put last
        self._kept: set[str] = set()  # archives that need not be looked at again

    async def run(self) -> None:
        """Put changed keys and new releases into the notes, again and again; does not return."""
        while True:
            self.put_keys()
            for archive in sorted((self._run_dir / "releases").glob("*.tar")):
                await self._put_archive(archive)
            await asyncio.sleep(_LOOK_S)

    def put_keys(self) -> None:
        """Put the keys, tokens and serials of the job's own authority into a note, but never the user's own keys."""
        folder, certified = run_dir_secrets.door_keys_folder(self._run_dir), run_dir_secrets.is_certified(self._run_dir)
        files = {path.name: path.read_bytes() for path in folder.iterdir() if _is_handed_over(path, certified)}
        if files != self._files:
            self._journal.put_note(_DOOR, msgspec.msgpack.encode(files))
            self._files = files

    async def _put_archive(self, archive: Path) -> None:
        digest = archive.stem
        if digest in self._kept:
            return
        self._kept.add(digest)
        size = await asyncio.to_thread(os.path.getsize, archive)
        if size > MOST_BYTES:
            large = f"release {digest[:12]} has {size >> 20} MiB; the journal takes {MOST_BYTES >> 20} at most"
            self._say(f"{large}: if another host takes over, nodes that lack this release do not get it")
            return
        if self._journal.get_note(f"{_RELEASE}{digest}"):
            return
        with archive.open("rb") as file:
            for number in range(-(-size // _CHUNK)):
                self._journal.put_note(f"{_RELEASE}{digest}/{number:05}", file.read(_CHUNK))
                await asyncio.sleep(0)
        self._journal.put_note(f"{_RELEASE}{digest}", str(size).encode())  # last: what has it is whole

    def forget_keys(self) -> None:
        """Remove the keys from the notes, because the run has ended."""
        self._journal.put_note(_DOOR, b"")


def _is_handed_over(path: Path, certified: bool) -> bool:
    return path.name == _SERIALS if certified else path.name != _SECRET and not path.name.startswith(".")


def fetch_run(lease: ControllerLease, run_dir: Path, secret: str) -> Begin | None:
    """Fetch a run's keys and releases from Postgres and return its Begin event. Return None if it never began. This
    host must have the lease. Raise JournalDamagedError if somebody without the secret has changed the journal."""
    key = JournalKey(secret, lease.run_id)
    with contextlib.closing(PostgresJournal(lease.url, lease.run_id, key=key)) as journal, journal.at_one_instant():
        return restore_run(journal, run_dir, secret, lease.seen_seq)


def restore_run(journal: PostgresJournal, run_dir: Path, secret: str, least: int = 0) -> Begin | None:
    """Write the run's keys and releases to this host's run directory; return the run's Begin event, None without one.
    Raises JournalDamagedError if the journal, which once had `least` entries, has fewer now."""
    journal.prove()
    if journal.seq < least:
        lost = f"had {least} entries, and has {journal.seq} now"
        raise JournalDamagedError(f"run {journal.run_id} {lost}: the database has lost some, or somebody put them back")
    begun = _read_begin(journal)
    _restore_keys(journal, run_dir_secrets.door_keys_folder(run_dir), secret)
    releases = run_dir / "releases"
    releases.mkdir(mode=0o700, exist_ok=True)
    for name in journal.list_notes(_RELEASE):
        digest = name.removeprefix(_RELEASE)
        if tree_archive.DIGEST.fullmatch(digest) and not (releases / f"{digest}.tar").exists():
            parts = [journal.get_note(part) for part in journal.list_notes(f"{name}/")]
            mutual_tls.write_secret(releases / f"{digest}.tar", b"".join(parts))
    return begun


def _read_begin(journal: PostgresJournal) -> Begin | None:
    entries = journal.read()
    begun = next(entries, None)
    for _ in entries:  # only the last one shows that all are of the history that was proved
        pass
    return begun.event if begun and isinstance(begun.event, Begin) else None


def _restore_keys(journal: PostgresJournal, folder: Path, secret: str) -> None:
    if not (files := journal.get_note(_DOOR)):
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, content in from_msgpack(files, dict[str, bytes]).items():
        mutual_tls.write_secret(folder / name, content)
    mutual_tls.write_secret(folder / _SECRET, secret.encode())
