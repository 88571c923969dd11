"""What a rank asks of the Linux kernel about itself, for which Python has no call."""

import ctypes
import mmap
import os
import signal
from collections.abc import Sequence
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p

_PR_SET_PDEATHSIG = 1
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_PR_SET_PTRACER, _PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


class _Map(ctypes.Structure):
    """struct prctl_mm_map."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in "start_code end_code start_data end_data start_brk brk".split()),
        *((name, ctypes.c_uint64) for name in "start_stack arg_start arg_end env_start env_end auxv".split()),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_int32),
    ]
    # Where proc_pid_stat(5) lists what must stay as it is.
    stays = {"start_code": 26, "end_code": 27, "start_stack": 28, "start_data": 45, "end_data": 46, "start_brk": 47}


def die_with_parent() -> None:
    """SIGKILL for this process when its parent dies; the caller checks that the parent is still the one it means."""
    if _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def allow_stacks() -> None:
    """Let any process of this user read our stack, also where Yama would allow it to parents only."""
    _libc.prctl(_PR_SET_PTRACER, _PTRACER_ANY, 0, 0, 0)  # fails without Yama, where it is not needed


def show_as(argv: Sequence[str], environ: Sequence[str]) -> bool:
    """Make ps and /proc show this command line and environment; False where the kernel cannot."""
    blocks = ["".join(f"{word}\0" for word in block).encode(errors="surrogateescape") for block in (argv, environ)]
    # The kernel reads them from private anonymous memory only; it must stay for the life of the process.
    text = mmap.mmap(-1, sum(map(len, blocks)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    text.write(b"".join(blocks))
    start = ctypes.addressof(ctypes.c_char.from_buffer(text))
    _shown.append(text)
    stat = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    layout = _Map(exe_fd=-1, **{name: int(stat[field - 3]) for name, field in _Map.stays.items()})
    layout.arg_start = start
    layout.arg_end = layout.env_start = start + len(blocks[0])
    layout.env_end = start + sum(map(len, blocks))
    # The heap must not have grown between the question and the answer, so ask again afterwards.
    while layout.brk != (brk := _libc.sbrk(0)):
        layout.brk = brk
        if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(layout), ctypes.c_ulong(ctypes.sizeof(layout)), 0) != 0:
            return False
    return True


def threads() -> int:
    """How many threads this process has."""
    return len(os.listdir("/proc/self/task"))


_shown: list[mmap.mmap] = []


def opened(prefix: str) -> str:
    """A file of ours whose path begins like this; empty when there is none."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if path.startswith(prefix):
            return path
    return ""
