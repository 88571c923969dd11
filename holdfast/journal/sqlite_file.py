"""Opens the SQLite file of a journal, on a disk of this host or on a file system that several hosts share.

On a disk of its own the file has a write-ahead log, which readers and writer share by mapped memory. Hosts cannot share
memory. So the writer of a shared file has a rollback journal, and locks the file for as long as it runs. Readers of
such a file take no lock. They may meet pages of two instants, so they must check what they read, and look again.
"""

import contextlib
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path

from holdfast.journal.journal_errors import JournalError, JournalFullError, JournalHeldError

_CHUNK = 1 << 20
_HAS_LOG = b"\x02"  # in the header of a file with a write-ahead log
_MODE_AT = 18
_OWNERS = 0o600
_BUSY_S, _HELD_S = 5.0, 1.0  # to wait for a lock; the writer of a shared file keeps it
_NO_MEMORY_BESIDE = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
_NO_LOCKS = (sqlite3.SQLITE_IOERR_LOCK, sqlite3.SQLITE_IOERR_RDLOCK, sqlite3.SQLITE_IOERR_CHECKRESERVEDLOCK)


def has_log(path: Path) -> bool:
    """Return whether the file has a write-ahead log. One that has none was closed, or is shared."""
    try:
        with path.open("rb") as file:
            file.seek(_MODE_AT)
            return file.read(1) == _HAS_LOG
    except OSError:
        return True


def is_shared_now(path: Path) -> bool:
    """Return whether a writer on some host has the shared file open, or died with it."""
    return not has_log(path) and _beside(path, "-journal").exists()


def open_to_read(path: Path) -> sqlite3.Connection:
    """Open the file for reading, also on read-only storage. SQLite reads a write-ahead log through a file of shared
    memory beside it. Where that is missing and cannot be made, read what a writer left in a copy."""
    if not has_log(path):
        return _connect(path, "ro&immutable=1", _BUSY_S)
    db = _connect(path, "ro", _BUSY_S)
    try:
        db.execute("select count(*) from sqlite_schema").fetchone()
    except sqlite3.Error as e:
        if _code_of(e) in _NO_MEMORY_BESIDE:
            db.close()
            return _open_copy_to_read(path)
    return db  # other errors come again where the file is read


def _open_copy_to_read(path: Path) -> sqlite3.Connection:
    log = _beside(path, "-wal")
    if not log.exists() or log.stat().st_size == 0:
        return _connect(path, "ro&immutable=1", _BUSY_S)
    try:
        return open_copy(path)
    except (OSError, sqlite3.Error) as e:
        why = e.strerror if isinstance(e, OSError) else str(e)
        raise JournalError(
            f"{path} was not closed by its writer, and cannot be read where nothing can be written: a copy of it in "
            f"a temporary folder failed ({why or e}); set TMPDIR to a folder with room for it"
        ) from None


def version_without_log(path: Path) -> tuple[int, ...]:
    """Return what differs once somebody has written to a file without a log. A connection that was opened to such a
    file shows it as it was then. Return () for a file with a log, whose connections show what is written later."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return () if has_log(path) else (found.st_ino, found.st_size, found.st_mtime_ns)


def open_to_write(path: Path, *, shared: bool) -> sqlite3.Connection:
    make_private(path)
    return _connect(path, "rwc", _HELD_S if shared else _BUSY_S)


def make_private(path: Path, *, anew: bool = False) -> None:
    """Make the file, for its owner alone, if it is not there; SQLite gives its mode to those that it keeps beside it.
    If that fails, SQLite tells why when it opens the file. With `anew`, remove the one that is there."""
    if anew:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _OWNERS))


def set_modes(db: sqlite3.Connection, *, shared: bool) -> None:
    """Prepare a writer's connection, before it reads or writes anything."""
    if shared:
        db.execute("pragma locking_mode = exclusive")  # first: then not even the log of an older file needs memory
    db.execute(f"pragma journal_mode = {'delete' if shared else 'wal'}")
    db.execute("pragma synchronous = full")


def open_copy(path: Path) -> sqlite3.Connection:
    """Copy the file and open the copy. SQLite takes back from it what a writer that died had begun to change, or adds
    what it had finished."""
    with tempfile.TemporaryDirectory(prefix="holdfast-journal-") as folder:
        for found in (path, _beside(path, "-journal"), _beside(path, "-wal")):
            if found.exists():
                shutil.copyfile(found, Path(folder) / found.name)
        db = sqlite3.connect(Path(folder) / path.name, isolation_level=None)
        try:
            db.execute("select count(*) from sqlite_schema").fetchone()
        except sqlite3.Error:
            db.close()
            raise
    return db  # an open file needs no name


def _beside(path: Path, suffix: str) -> Path:
    """Return the path of a file that SQLite keeps beside its own."""
    return path.with_name(path.name + suffix)


def _connect(path: Path, mode: str, timeout_s: float) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    try:
        return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=timeout_s)
    except sqlite3.Error as e:
        raise make_error(path, e) from None


def make_error(path: Path, why: Exception, *, shared: bool = False) -> JournalError:
    if _code_of(why) == sqlite3.SQLITE_FULL:
        return JournalFullError(f"{path} cannot grow: the disk that holds it is full")
    if shared and _code_of(why) == sqlite3.SQLITE_BUSY:
        return JournalHeldError(f"{path} is locked by another controller, on this host or on another one")
    if shared and getattr(why, "sqlite_errorcode", 0) in _NO_LOCKS:
        return JournalError(f"the file system of {path} has no locks; give another --run-dir, or --journal")
    return JournalError(f"{path} cannot be used as a journal: {str(why) or type(why).__name__}")


def is_corrupt(why: sqlite3.Error) -> bool:
    return _code_of(why) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _code_of(why: Exception) -> int:
    """Return the primary error code of SQLite; 0 if the error is none of SQLite's."""
    return int(getattr(why, "sqlite_errorcode", 0)) & 0xFF


def copy_durably(source: Path, target: Path) -> None:
    make_private(target)
    with source.open("rb") as given, target.open("wb") as taken:
        while chunk := given.read(_CHUNK):
            taken.write(chunk)
        taken.flush()
        os.fsync(taken.fileno())


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
