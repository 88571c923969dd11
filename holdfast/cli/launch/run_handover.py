"""What a controller on another host needs besides the journal, in notes in Postgres: sealed keys, and releases."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from holdfast.cli.run_dirs import run_directory
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.journal.postgres_journal import PostgresJournal
from holdfast.model.event import Begin
from holdfast.wire.credentials import mutual_tls, sealed_files
from holdfast.wire.releases import tree_archive

MOST_BYTES = 64 << 20  # of one release; a larger one is not handed over
_CHUNK = 1 << 20  # one statement is answered at once
_LOOK_S = 1.0
_DOOR, _RELEASE = "door", "release/"
_SERIALS = "nodes.json"  # of the folder of keys; the rest are keys and tokens
_SECRET = "secret"  # the successor has it already, or it is none


class HandoverNotes:
    """The controller's side: keeps the notes as its run directory is."""

    def __init__(self, journal: PostgresJournal, run_dir: Path, say: Callable[[str], None]) -> None:
        self._journal, self._run_dir, self._say = journal, run_dir, say
        self._files: dict[str, bytes] = {}  # as they were put last
        self._kept: set[str] = set()  # archives that need not be looked at again

    async def run(self) -> None:
        """Look for what has changed; this does not return."""
        while True:
            self.put_keys()
            for archive in sorted((self._run_dir / "releases").glob("*.tar")):
                await self._put_archive(archive)
            await asyncio.sleep(_LOOK_S)

    def put_keys(self) -> None:
        """Put the keys of the job's own authority, sealed, and who has joined. Keys of the user's own stay away."""
        folder, certified = run_directory.door_keys_folder(self._run_dir), run_directory.is_certified(self._run_dir)
        files = {path.name: path.read_bytes() for path in folder.iterdir() if _is_handed_over(path, certified)}
        if files != self._files:
            secret = "" if certified else run_directory.read_door_secret(self._run_dir)
            self._journal.put_note(_DOOR, sealed_files.seal_files(files, secret, self._journal.run_id))
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
        """Remove the keys, because the run has ended."""
        self._journal.put_note(_DOOR, b"")


def _is_handed_over(path: Path, certified: bool) -> bool:
    return path.name == _SERIALS if certified else path.name != _SECRET and not path.name.startswith(".")


def fetch_run(url: str, run_id: str, run_dir: Path, secret: str) -> Begin | None:
    """Bring what an earlier controller left in the journal to this host; None if no controller has begun yet."""
    with contextlib.closing(PostgresJournal(url, run_id)) as journal:
        return restore_run(journal, run_dir, secret)


def restore_run(journal: PostgresJournal, run_dir: Path, secret: str) -> Begin | None:
    """Write keys and releases to this host's run directory and return how the run began; None if it had not begun."""
    _restore_keys(journal, run_directory.door_keys_folder(run_dir), secret)
    releases = run_dir / "releases"
    releases.mkdir(mode=0o700, exist_ok=True)
    for name in journal.list_notes(_RELEASE):
        digest = name.removeprefix(_RELEASE)
        if tree_archive.DIGEST.fullmatch(digest) and not (releases / f"{digest}.tar").exists():
            parts = [journal.get_note(part) for part in journal.list_notes(f"{name}/")]
            mutual_tls.write_secret(releases / f"{digest}.tar", b"".join(parts))
    begun = next(iter(journal.read()), None)
    return begun.event if begun and isinstance(begun.event, Begin) else None


def _restore_keys(journal: PostgresJournal, folder: Path, secret: str) -> None:
    sealed = journal.get_note(_DOOR)
    if not sealed:
        return
    try:
        files = sealed_files.unseal_files(sealed, secret, journal.run_id)
    except sealed_files.SealError:
        raise UsageError(
            f"the keys of run {journal.run_id} in the journal were sealed with another secret, or are damaged; set "
            "HOLDFAST_TOKEN to the same value on every host"
        ) from None
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, content in files.items():
        if "/" not in name:
            mutual_tls.write_secret(folder / name, content)
    if secret:
        mutual_tls.write_secret(folder / _SECRET, secret.encode())
