"""Handles on processes by pidfd and start time, so that a reused pid is never hit."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.chaos.injection_records import CannotInject

_STARTED = 19  # of the fields after the name, see proc(5)


def read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def start_ticks(pid: int) -> int:
    """Return a process's start time in kernel ticks; 0 if there is no such process."""
    fields = read_stat(pid)
    return int(fields[_STARTED]) if fields else 0


def process_state(pid: int) -> str:
    fields = read_stat(pid)
    return fields[0] if fields else ""


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
    except OSError:
        return []


def child_pids(pid: int) -> list[int]:
    names = [name for name in os.listdir("/proc") if name.isdecimal()]
    return [int(name) for name in names if (fields := read_stat(int(name))) and fields[1] == str(pid)]


def is_descendant(pid: int, ancestor: int) -> bool:
    """Return whether a process is this ancestor or descends from it."""
    while pid > 1 and pid != ancestor:
        fields = read_stat(pid)
        pid = int(fields[1]) if fields else 0
    return pid == ancestor


class ProcessHandle:
    """One process, opened by pidfd so that a reused pid is never hit; raises CannotInject if the process has ended."""

    def __init__(self, pid: int, born: int = 0) -> None:
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)
        except (ProcessLookupError, PermissionError) as e:
            raise CannotInject(f"process {pid} cannot be held: {e.strerror}") from None
        self.started = start_ticks(pid)
        if not self.started or (born and born != self.started):
            os.close(self._fd)
            raise CannotInject(f"process {pid} has ended")

    def __enter__(self) -> "ProcessHandle":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)

    def send_signal(self, number: int) -> None:
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            raise CannotInject(f"process {self.pid} has ended") from None
        except PermissionError:
            raise CannotInject(f"process {self.pid} belongs to another user; run this as the job's user") from None

    def stop(self, wait_s: float = 2.0) -> bool:
        """Stop the process and wait until it has stopped. Return False if it has ended or does not stop in time."""
        self.send_signal(signal.SIGSTOP)
        until = time.monotonic() + wait_s
        while process_state(self.pid) not in ("T", "t"):
            if process_state(self.pid) in ("", "Z", "X") or time.monotonic() > until:
                return False
            time.sleep(0.0002)
        return True


def open_confirmed(find: Callable[[], int]) -> ProcessHandle:
    """Open the process found by `find`; raises CannotInject if a second `find` returns another process."""
    held = ProcessHandle(find())
    try:
        if find() == held.pid:
            return held
    except CannotInject:
        held.__exit__()
        raise
    held.__exit__()
    raise CannotInject(f"process {held.pid} has ended")
