"""The folder of a host that holds copies of releases: each copy is whole or absent, and shared by all nodes."""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.model.code_release import Release
from holdfast.wire.releases import release_tree_sync, tree_archive
from holdfast.wire.releases.tree_archive import MIB, ArchiveError

NAME = 16  # characters of a digest
_SPARE_BYTES = 1 << 20  # of a disk, beside what a release takes: with less it counts as full
_ALONE_S = 60.0  # somebody else who takes longer to put a copy there may be stopped: then we do it, too
_LOOK_S = 0.02
_log = logging.getLogger("holdfast.agent")


class ReleaseFolder:
    """Stores release copies. The first process that needs a copy makes it, be it a command or a node."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def copy_of(self, digest: str) -> Path:
        return self.path / digest[:NAME]  # it stands in every traceback

    def draft_path(self, name: str, kind: str) -> Path:
        """Return a new path for a copy that this process alone is building or removing."""
        return self.path / f"{name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}"

    def holds_release(self, release: Release) -> bool:
        """Return whether the folder has a complete copy. Remove a copy made before the last boot: it may lack data."""
        self.path.mkdir(parents=True, exist_ok=True)
        at = self.copy_of(release.digest)
        if not at.is_dir():
            return False
        mark = at.with_name(f"{at.name}.mark")
        if (
            mark.exists()
            and mark.read_bytes() == _mark_of(release.digest)
            and release_tree_sync.read_index(at) is not None
        ):
            os.utime(at)
            return True
        self.remove_copy(at)
        return False

    def check_room(self, size_bytes: int) -> None:
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize
        if free < size_bytes + _SPARE_BYTES:
            raise ArchiveError(
                f"it needs {size_bytes / MIB:.0f} MiB and {_SPARE_BYTES // MIB} MiB to spare, "
                f"but the disk of {self.path} has {free / MIB:.0f} MiB free"
            )

    def put_release(self, release: Release, archive: Path) -> None:
        """Store a release copy unless the folder has it; raises OSError or ArchiveError if that fails."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._alone():
            if not self.holds_release(release):
                self._put(release, archive)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Run the block while no other process stores a copy in this folder, so that each copy is made only once. If
        the other process takes too long, run the block all the same."""
        with (self.path / ".putting").open("ab") as file:
            until = time.monotonic() + _ALONE_S
            while not _try_lock(file.fileno()) and time.monotonic() < until:
                time.sleep(_LOOK_S)
            yield

    def _put(self, release: Release, archive: Path) -> None:
        self.check_room(tree_archive.unpacked_bytes(archive))
        at = self.copy_of(release.digest)
        partial = self.draft_path(at.name, "partial")
        try:
            files = tree_archive.unpack_archive(archive, partial, release.digest)
            index = release_tree_sync.make_index(files, partial, release.root, release.home)
            release_tree_sync.link_user_files(partial, index)
            if not at.exists():
                release_tree_sync.write_index(at, index)
            mark = self.draft_path(at.name, "mark")
            mark.write_bytes(_mark_of(release.digest))
            mark.replace(at.with_name(f"{at.name}.mark"))
            with contextlib.suppress(FileExistsError):  # another node of this host was faster
                _rename_whole(partial, at)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def remove_copy(self, at: Path) -> None:
        """Remove a release copy; rename and keep it if ranks' files in it could not be moved to the user's tree."""
        gone = self.draft_path(at.name, "old")
        with (
            contextlib.suppress(OSError),
            release_tree_sync.lock_trees(self.path),
        ):  # another node of this host was faster
            if stuck := release_tree_sync.gather_files(at)[1].stuck:
                _log.warning("%s", "; ".join(stuck))
            at.rename(at.with_name(f"{at.name}.saved") if stuck else gone)
            release_tree_sync.forget_index(at)
        shutil.rmtree(gone, ignore_errors=True)


def _rename_whole(partial: Path, to: Path) -> None:
    try:
        partial.rename(to)
    except OSError as e:
        if to.is_dir():
            raise FileExistsError from e
        raise


def _mark_of(digest: str) -> bytes:
    return f"{digest} {Path('/proc/sys/kernel/random/boot_id').read_text()}".encode()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
