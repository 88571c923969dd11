"""Calls to Linux that make and enter namespaces; chaos works only inside namespaces that it made itself."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

from holdfast.chaos.injection_records import CannotInject

NEWNS, NEWNET, NEWUTS = 0x00020000, 0x40000000, 0x04000000
SOURCE = "holdfast-chaos"  # what is mounted, as mountinfo shows it
NOT_SMALL = "is not a small file system that chaos made"
_RDONLY, _REMOUNT, _PRIVATE, _REC = 1, 32, 1 << 18, 1 << 14
_NOSUID, _NODEV = 2, 4
_libc = ctypes.CDLL(None, use_errno=True)


def _check_result(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    _check_result(_libc.unshare(flags), "unshare")


def enter_namespace(space: int, kind: int) -> None:
    _check_result(_libc.setns(space, kind), "setns")


@contextlib.contextmanager
def in_network(space: int | None) -> Iterator[None]:
    """Run the block with this thread in the network namespace `space`; None stands for its present namespace."""
    if space is None:
        yield
        return
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter_namespace(space, NEWNET)
        yield
    finally:
        enter_namespace(home, NEWNET)
        os.close(home)


def make_mounts_private() -> None:
    """Give this process its own mounts; nothing mounted from here on reaches other processes."""
    unshare(NEWNS)
    _check_result(_libc.mount(b"none", b"/", None, _REC | _PRIVATE, None), "mount --make-rprivate /")


def mount_small_disk(path: str, size_bytes: int) -> None:
    """Mount a tmpfs of this size; call it in a mount namespace of our own."""
    options = f"size={size_bytes},mode=0700".encode()
    _check_result(_libc.mount(SOURCE.encode(), os.fsencode(path), b"tmpfs", _NOSUID | _NODEV, options), f"mount {path}")


def has_own_mounts(pid: int) -> bool:
    """Return whether a process is in a different mount namespace from ours; False if the process is gone."""
    try:
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino != os.stat("/proc/self/ns/mnt").st_ino
    except OSError:
        return False


def is_small_disk(pid: int, path: str) -> bool:
    """Return whether a path is a small file system that `mount_small_disk` made."""
    try:
        with open(f"/proc/{pid}/mountinfo", encoding="utf-8") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return False
    return any(fields[4] == path and fields[-2] == SOURCE for fields in mounts)


def run_inside(pid: int, deed: Callable[[], object]) -> None:
    """Run `deed` in a forked child in the mount namespace of process `pid`; if it raises OSError, raise the same."""
    child = os.fork()
    if child == 0:
        code = 0
        try:
            space = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
            root = os.open(f"/proc/{pid}/root", os.O_RDONLY)
            enter_namespace(space, NEWNS)
            os.fchdir(root)
            deed()
        except OSError as e:
            code = e.errno or 1
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise OSError(code, os.strerror(code))


def remount(pid: int, path: str, *, read_only: bool) -> None:
    """Remount a small disk that chaos made, read-only or writable; raises CannotInject for any other mount."""
    if not has_own_mounts(pid) or not is_small_disk(pid, path):
        raise CannotInject(f"{path} {NOT_SMALL}; only those are set read-only")
    flags = _REMOUNT | _NOSUID | _NODEV | (_RDONLY if read_only else 0)
    run_inside(pid, lambda: _check_result(_libc.mount(None, os.fsencode(path), None, flags, None), f"remount {path}"))
