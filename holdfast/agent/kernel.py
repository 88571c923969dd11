"""The few things we ask of Linux that Python has no name for."""

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Orphans below us become our children instead of init's."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(parent: int) -> None:
    """For a fresh child of this process, before it executes its program."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it died before we had asked


def _stat(pid: int | str) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def state_of(pid: int) -> str:
    """R, S, D, T, Z ...; empty when there is no such process."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def children() -> list[int]:
    """Our children, the adopted ones and the dead that are still to be reaped included."""
    me = str(os.getpid())
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(name)) and fields[1] == me:
            found.append(int(name))
    return found
