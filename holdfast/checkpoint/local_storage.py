"""Checkpoint storage in a local folder or a shared file system; completed writes are on stable storage."""

import errno
import itertools
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from holdfast.checkpoint.direct_io import InputFile, write_file
from holdfast.checkpoint.manifest import (
    WriteAttempt,
    check_small,
    gone_name,
    staged_name,
    staged_of,
    step_name,
    step_of,
)
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.write_lane import WritePulse
from holdfast.linux.regular_files import open_regular

_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}


class LocalStorage:
    """One folder; names are relative to it. Every OSError becomes a StorageError with one sentence."""

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)

    def url(self, name: str = "") -> str:
        return os.path.join(self._path, name) if name else self._path

    def read_identity(self) -> tuple[int, int] | None:
        """Return the file system and the inode of this folder; None if it does not exist."""
        with _as_storage_error(f"{self._path} cannot be looked at"):
            try:
                found = os.stat(self._path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return found.st_dev, found.st_ino

    def staging_name(self, step: int, tag: str) -> str:
        return staged_name(step, tag)

    def list_names(self, folder: str = "") -> list[str]:
        """Return the sorted names in a folder; empty if the folder does not exist."""
        with _as_storage_error(f"{self.url(folder)} cannot be listed"):
            try:
                return sorted(os.listdir(self.url(folder)))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def list_unpublished(self) -> list[WriteAttempt]:
        """List folders whose write or removal has not finished."""
        return [attempt for name in self.list_names() if (attempt := staged_of(name))]

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist."""
        with _as_storage_error(f"{self.url(name)} cannot be read"):
            try:
                with open(open_regular(self.url(name)), "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    check_small(name, size)
                    return file.read(size)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def file_size(self, name: str) -> int | None:
        """Return the size of a file; None if it does not exist."""
        with _as_storage_error(f"{self.url(name)} cannot be looked at"):
            try:
                return os.stat(self.url(name)).st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def open(self, name: str) -> InputFile | None:
        """Open a file to read it in blocks; None if it does not exist."""
        with _as_storage_error(f"{self.url(name)} cannot be read"):
            try:
                return InputFile(self.url(name))
            except FileNotFoundError:
                return None

    def make_folder(self, folder: str = "") -> None:
        with _as_storage_error(f"{self.url(folder)} cannot be made"):
            _make_folders(self.url(folder))
            if folder and os.path.islink(self.url(folder)):  # put there by others: our files would land elsewhere
                raise OSError(errno.ELOOP, "it is a link")

    def put_file(self, name: str, content: bytes) -> None:
        """Write a small file atomically."""
        with _as_storage_error(f"{self.url(name)} cannot be written"):
            _put_file(self.url(name), content)

    def put_mark(self, name: str, content: bytes) -> None:
        """Write a small file. If that fails, as on a full disk, overwrite the file in place or make an empty one."""
        try:
            self.put_file(name, content)
        except StorageError:
            with _as_storage_error(f"{self.url(name)} cannot be written"):
                _overwrite_file(self.url(name), content)

    def write(self, name: str, ranges: Sequence[memoryview], threads: int, pulse: WritePulse) -> str:
        """Write a large file; return the checksums of its blocks."""
        with _as_storage_error(f"{self.url(name)} cannot be written"):
            return write_file(self.url(name), ranges, threads, pulse)

    def sync_folder(self, folder: str = "") -> None:
        """Sync a folder, so that the names in it survive a crash."""
        with _as_storage_error(f"{self.url(folder)} cannot be synced"):
            _sync_folder(self.url(folder))

    def remove_file(self, name: str) -> None:
        """Remove a file if it exists."""
        with _as_storage_error(f"{self.url(name)} cannot be removed"), suppress(FileNotFoundError):
            os.unlink(self.url(name))

    def drop_empty_folder(self) -> None:
        """Remove this folder if nothing is in it."""
        with suppress(OSError):
            os.rmdir(self._path)

    def publish(self, staged: str, step: int) -> str:
        """Rename a finished folder atomically into a checkpoint; return its new name."""
        self.sync_folder(staged)
        with _as_storage_error(f"{self.url(staged)} cannot be published"):
            name = self._rename_staged(staged, step)
        self.sync_folder()
        return name

    def _rename_staged(self, staged: str, step: int) -> str:
        for mark in itertools.count(1):
            name = step_name(step, str(mark) if mark > 1 else "")
            try:
                os.rename(self.url(staged), self.url(name))
                return name
            except OSError as e:
                # No folder is renamed onto one that holds something: an earlier write of this step is not touched.
                if e.errno not in _TAKEN:
                    raise
        raise AssertionError("numbers do not end")

    def remove_folder(self, folder: str) -> None:
        """Remove a folder; a checkpoint is renamed first, so that it disappears atomically."""
        step = step_of(folder)
        with _as_storage_error(f"{self.url(folder)} cannot be removed"):
            if step is not None:
                gone = gone_name(step, secrets.token_hex(4))
                os.rename(self.url(folder), self.url(gone))
                _sync_folder(self._path)
                folder = gone
            _remove_tree(self.url(folder))


@contextmanager
def _as_storage_error(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise StorageError(f"{what}: {e.strerror or e}") from e


def _put_file(path: str, content: bytes) -> None:
    fresh = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(fresh)  # of a writer that died, or a link: whoever may write here could have put one in its place
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    except OSError:
        os.unlink(fresh)  # a full disk has no room for it
        raise
    finally:
        os.close(fd)
    os.rename(fresh, path)


def _overwrite_file(path: str, content: bytes) -> None:
    make = os.O_CREAT if os.listdir(os.path.dirname(path)) else 0  # in an empty folder nobody waits for it
    fd = os.open(path, os.O_WRONLY | make | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        whole = os.fstat(fd).st_size > 0  # the block of a small file takes any other
        with suppress(OSError):
            whole = whole and os.pwrite(fd, content, 0) == len(content)
        os.ftruncate(fd, len(content) if whole else 0)
    finally:
        os.close(fd)


def _make_folders(path: str) -> None:
    """Make a folder and any missing parents. Each parent is synced to disk, so the new entry survives a crash."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    except FileNotFoundError:
        above = os.path.dirname(path)
        if not os.path.isdir(above):  # it is if another node has made it meanwhile, and in /proc
            _make_folders(above)
        with suppress(FileExistsError):
            os.mkdir(path)
    _sync_folder(os.path.dirname(path))


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno != errno.EINVAL:  # a file system whose folders need no syncing
            raise
    finally:
        os.close(fd)


def _remove_tree(path: str) -> None:
    """Remove a folder with its content, also while another process does so. If `path` is a link, remove the link."""

    def pass_on(call: object, at: str, why: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(why[1], FileNotFoundError):
            raise why[1]

    with suppress(FileNotFoundError):
        if os.path.islink(path):
            os.unlink(path)
        else:
            shutil.rmtree(path, onerror=pass_on)
