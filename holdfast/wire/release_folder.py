"""The folder of a host in which copies of releases lie: each put there whole or not at all, and once for all nodes."""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.model.release import Release
from holdfast.wire import beside, tree
from holdfast.wire.tree import MIB, TreeError

NAME = 16  # characters of a digest
_SPARE_BYTES = 1 << 20  # of a disk, beside what a release takes: with less it counts as full
_ALONE_S = 60.0  # somebody else who takes longer to put a copy there may be stopped: then we do it, too
_LOOK_S = 0.02
_log = logging.getLogger("holdfast.agent")


class ReleaseFolder:
    """Whoever is first puts a copy there: the command that starts a job, or one of its nodes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def copy_of(self, digest: str) -> Path:
        return self.path / digest[:NAME]  # it stands in every traceback

    def draft(self, name: str, kind: str) -> Path:
        """What is put together or taken apart, and by whom; nobody else has it."""
        return self.path / f"{name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}"

    def holds(self, release: Release) -> bool:
        """A tree from before the machine was started anew may lack what had not reached the disk."""
        self.path.mkdir(parents=True, exist_ok=True)
        at = self.copy_of(release.digest)
        if not at.is_dir():
            return False
        mark = at.with_name(f"{at.name}.mark")
        if mark.exists() and mark.read_bytes() == _mark(release.digest) and beside.read(at) is not None:
            os.utime(at)
            return True
        self.remove(at)
        return False

    def check_room(self, size_bytes: int) -> None:
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize
        if free < size_bytes + _SPARE_BYTES:
            raise TreeError(
                f"it takes {size_bytes / MIB:.0f} MiB beside {_SPARE_BYTES // MIB} to spare, "
                f"and the disk that holds {self.path} has {free / MIB:.0f} MiB"
            )

    def put(self, release: Release, archive: Path) -> None:
        """Unless it is there; OSError or TreeError if it cannot be had."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._alone():
            if not self.holds(release):
                self._put(release, archive)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One at a time, as far as that can be had: two would do the same work twice."""
        with (self.path / ".putting").open("ab") as file:
            until = time.monotonic() + _ALONE_S
            while not _locked(file.fileno()) and time.monotonic() < until:
                time.sleep(_LOOK_S)
            yield

    def _put(self, release: Release, archive: Path) -> None:
        self.check_room(tree.unpacked_bytes(archive))
        at = self.copy_of(release.digest)
        partial = self.draft(at.name, "partial")
        try:
            tree.unpack(archive, partial, release.digest)
            index = beside.make(archive, partial, release.root, release.home)
            beside.link(partial, index)
            if not at.exists():
                beside.write(at, index)
            mark = self.draft(at.name, "mark")
            mark.write_bytes(_mark(release.digest))
            mark.replace(at.with_name(f"{at.name}.mark"))
            with contextlib.suppress(FileExistsError):  # another node of this host was faster
                _rename(partial, at)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def remove(self, at: Path) -> None:
        """But for work that is nowhere else."""
        gone = self.draft(at.name, "old")
        with contextlib.suppress(OSError), beside.alone(self.path):  # another node of this host was faster
            if stuck := beside.gather(at)[1].stuck:
                _log.warning("%s", "; ".join(stuck))
            at.rename(at.with_name(f"{at.name}.saved") if stuck else gone)
            beside.forget(at)
        shutil.rmtree(gone, ignore_errors=True)


def _rename(partial: Path, to: Path) -> None:
    try:
        partial.rename(to)
    except OSError as e:
        if to.is_dir():
            raise FileExistsError from e
        raise


def _mark(digest: str) -> bytes:
    return f"{digest} {Path('/proc/sys/kernel/random/boot_id').read_text()}".encode()


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
