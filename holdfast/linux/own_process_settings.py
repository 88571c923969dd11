"""Process control through the kernel: death with a parent, adoption of orphans, the command line that ps shows."""

import ctypes
import mmap
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p

_PR_SET_PDEATHSIG = 1
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER, _PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # glibc has no function for this call
_IOPRIO_WHO_PROCESS, _BEST_EFFORT_LAST = 1, (2 << 13) | 7

_SHELL = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0);"
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.nice(int(sys.argv[2]));"
    "os.execl('/bin/sh', 'sh', '-c', sys.argv[3])"
)

# To a node that its cluster has warned. Who does not handle it yet ignores it, so it ends no process that only begins.
END_WARNING = signal.SIGURG

# Left as they are: the interpreter's own handlers for these belong to faulthandler.
_FATAL = {signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}
_FRESH: dict[int, signal.Handlers | Callable[[int, FrameType | None], object]] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGPIPE: signal.SIG_IGN,
    signal.SIGXFSZ: signal.SIG_IGN,
}


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


# --- this process ------------------------------------------------------------------------------------------------


def yield_disk() -> None:
    """Give this thread's disk I/O the lowest best-effort priority; some I/O schedulers ignore it."""
    if call := _IOPRIO_SET.get(os.uname().machine):
        _libc.syscall(call, _IOPRIO_WHO_PROCESS, 0, _BEST_EFFORT_LAST)


def become_subreaper() -> None:
    """Make orphans below this process its children instead of init's."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(parent: int, code: int = 1) -> None:
    """Have the kernel kill this process when its parent dies; exit at once if `parent` is no longer the parent."""
    if _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(code)  # it died before we had asked


def die_with(pid: int) -> None:
    """Kill this process when process `pid` (any process) dies. Exit at once if `pid` is already gone."""
    if os.getppid() == pid:
        die_with_parent(pid)
        return
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        select.select([fd], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name=f"dies-with-{pid}", daemon=True).start()


def raise_file_limit() -> None:
    """Raise the limit of open files to its hard limit, since a controller needs one file for every node."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def write_no_core() -> None:
    """Turn off core dumps of this process and of those that it starts, because there are keys in its memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def allow_stack_reads() -> None:
    """Let any process of this user read our stack, even where Yama allows that only to parents."""
    _libc.prctl(_PR_SET_PTRACER, _PTRACER_ANY, 0, 0, 0)  # fails without Yama, where it is not needed


def set_command_line(argv: Sequence[str], environ: Sequence[str]) -> bool:
    """Make ps and /proc show this command line and environment. Return False if the kernel does not allow it."""
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


_shown: list[mmap.mmap] = []


def reset_signals() -> None:
    """Reset the signal handlers and the signal mask to the defaults of a fresh interpreter."""
    for number in signal.valid_signals() - _FATAL - {signal.SIGKILL, signal.SIGSTOP}:
        fresh = _FRESH.get(number, signal.SIG_DFL)
        if signal.getsignal(number) != fresh:
            signal.signal(number, fresh)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def close_all_but(keep: Iterable[int]) -> None:
    """Close every open file of this process except these."""
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - set(keep):
        try:
            os.close(fd)
        except OSError:
            pass  # the one that listed the folder


def count_threads() -> int:
    """Return how many threads this process has."""
    return len(os.listdir("/proc/self/task"))


def find_open_file(prefix: str) -> str:
    """Return the path of a file open in this process whose path begins with `prefix`; empty if there is none."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if path.startswith(prefix):
            return path
    return ""


# --- others ------------------------------------------------------------------------------------------------------


_STATE, _STARTED = 0, 19  # of the fields of _stat: its state, and when it was started, in ticks
_ZOMBIE = "Z"  # it has ended, and its parent has not looked yet


def _read_stat(pid: int | str) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def own_age_s() -> float:
    """Return how long ago this process was started or forked; 0 if that cannot be read."""
    fields = _read_stat("self")
    if not fields:
        return 0.0
    started_s = int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


def process_state(pid: int) -> str:
    """Return the state letter of a process (R, S, D, T, Z ...); empty if there is no such process."""
    fields = _read_stat(pid)
    return fields[0] if fields else ""


def list_children() -> list[int]:
    """Return the pids of our children, including adopted ones and dead ones not yet reaped."""
    me = str(os.getpid())
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _read_stat(name)) and fields[1] == me:
            found.append(int(name))
    return found


def leave_input_note(note: Path) -> None:
    """Write a file that names this process, so that others of this user can open its standard input."""
    stat = _read_stat("self")
    if stat is not None:
        note.write_text(f"{os.getpid()} {stat[_STARTED]}")


def is_note_writer_alive(note: Path) -> bool:
    """Return whether the process that wrote this file with `leave_input_note` is alive."""
    return _noted_pid(note) is not None


def _noted_pid(note: Path) -> int | None:
    """Return the pid that `leave_input_note` wrote to this file; None if that process is gone."""
    try:
        pid, started = note.read_text().split()
        stat = _read_stat(int(pid))
    except (OSError, ValueError):
        return None
    return int(pid) if stat is not None and stat[_STARTED] == started and stat[_STATE] != _ZOMBIE else None


def open_input(note: str) -> int:
    """Open the standard input of the process that left the note; /dev/null if that process is gone.

    Does not wait for a writer, and takes no controlling terminal.
    """
    pid = _noted_pid(Path(note))
    path = f"/proc/{pid}/fd/0" if pid is not None else os.devnull
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.set_blocking(fd, True)
    return fd


def shell_argv(command: str, nice: int = 0) -> tuple[str, ...]:
    """Return the argv of a shell that runs this command and dies with this process, so it never becomes an orphan."""
    return (sys.executable, "-I", "-c", _SHELL, str(os.getpid()), str(nice), command)
