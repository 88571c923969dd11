"""Journals on storage that takes nothing: a read-only mount, also for root, and a folder that we may not write to."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.journal.journal_errors import JournalError
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.journal_entry import Entry
from tests.conftest import ROOT, job_environment
from tests.journal.torn import entries, opened, write

FROZEN = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
ENDS = ("closed", "killed", "killed, and no shared memory", "no log", "empty log")
_NOBODY = 65534

# What it reads from each folder, or why it cannot; and whether anything could be written there.
READ = """
import json, sys
from pathlib import Path
from tests.journal.test_read_only_storage import found_in, is_writable
base = Path(sys.argv[1])
print(json.dumps({folder.name: [is_writable(folder), found_in(folder)] for folder in base.iterdir()}))
"""


def found_in(folder: Path) -> int | str:
    """How many entries a reader finds; or what it says."""
    path = folder / "journal.db"
    try:
        with contextlib.closing(SqliteJournal(path, read_only=True, mark_path=folder / "journal.mark")) as journal:
            return len(list(journal.read()))
    except JournalError as e:
        return str(e)


def is_writable(folder: Path) -> bool:
    try:
        (folder / "new").touch()
    except OSError:
        return False
    return True


def leave(folder: Path, end: str) -> None:
    """A journal as a writer leaves it that ended in this way."""
    living, place = folder / "living", folder / end
    for made in (living, place):
        made.mkdir()
    journal = opened(living)
    write(journal, some())
    if end == "closed":
        journal.close()
    elif "log" in end:  # all of it is in the file itself, whose header still names a log
        journal._db.execute("pragma wal_checkpoint(truncate)").fetchall()
    for file in living.iterdir():
        shutil.copy2(file, place / file.name)
    journal._db.close()
    if end in ("killed, and no shared memory", "no log", "empty log"):  # as in a copy that somebody has made
        (place / "journal.db-shm").unlink()
    if end == "no log":
        (place / "journal.db-wal").unlink()
    shutil.rmtree(living)


def some() -> tuple[Entry, ...]:
    return tuple(msgspec.structs.replace(entry, seq=number) for number, entry in enumerate(entries()[:120], start=1))


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """A folder with a journal of every end, which everybody may read, and its owner alone may change."""
    base = tmp_path / "frozen"
    base.mkdir()
    for end in ENDS:
        leave(base, end)
    above = [folder for folder in base.parents if folder.stat().st_uid == os.getuid() and folder != Path("/")]
    modes = {folder: folder.stat().st_mode & 0o7777 for folder in above}
    for path in base.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for folder in above:
        folder.chmod(0o755)
    yield base
    for folder, mode in modes.items():
        folder.chmod(mode)
    for folder in base.iterdir():
        folder.chmod(0o755)


def test_on_a_read_only_mount(frozen: Path) -> None:
    """For root nothing else is read-only."""
    words = ["unshare", "-rm", "sh", "-c", FROZEN, str(frozen), sys.executable, "-c", READ, str(frozen)]
    done = subprocess.run(
        words, check=False, cwd=ROOT, env=job_environment(), capture_output=True, text=True, timeout=120
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {end: [False, 120] for end in ENDS}


def test_in_a_folder_that_we_may_not_write_to(frozen: Path) -> None:
    room = frozen.parent / "room"  # for a copy
    room.mkdir()
    room.chmod(0o777)

    def read() -> dict[str, object]:
        tempfile.tempdir = str(room)
        return {folder.name: [is_writable(folder), found_in(folder)] for folder in frozen.iterdir()}

    assert as_nobody(read) == {end: [False, 120] for end in ENDS}
    assert not list(room.iterdir()), "the copy has no name any more"


def test_what_cannot_be_read_is_one_sentence(frozen: Path) -> None:
    """There is no folder in which a copy could lie, either."""

    def read() -> dict[str, object]:
        tempfile.tempdir = str(frozen)
        return {folder.name: found_in(folder) for folder in frozen.iterdir()}

    found = as_nobody(read)
    said = str(found.pop("killed, and no shared memory"))
    assert found == {end: 120 for end in ENDS if end in found}
    path = frozen / "killed, and no shared memory" / "journal.db"
    assert said.startswith(f"{path} was not closed by its writer, and cannot be read where nothing can be written")
    assert said.endswith("(Permission denied); set TMPDIR to a folder with room for it")


def as_nobody(act: Callable[[], dict[str, object]]) -> dict[str, object]:
    """What a process finds that is not root; a fork, as others may not read our interpreter."""
    out, tell = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(_NOBODY)
                os.setuid(_NOBODY)
            os.write(tell, json.dumps(act()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(out) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    found: dict[str, object] = json.loads(text)
    return found
