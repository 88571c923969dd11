"""Reads processes from /proc: to find a rank's children, and to tell whether a pid is still the same process."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_CUDA = "/dev/nvidia-uvm"
_NOT_TRAINING = (b"resource_tracker", b"multiprocessing.forkserver")  # helpers of Python's own, always asleep


class ProcessStat(NamedTuple):
    """One process at one instant; pid and start together identify it."""

    pid: int
    name: str
    state: str
    parent: int
    session: int
    cpu_s: float
    start: int


def read_stat(pid: int) -> ProcessStat | None:
    """Return what the kernel knows of a process; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    field = rest.split()
    cpu_s = (int(field[11]) + int(field[12])) * _TICK_S
    return ProcessStat(pid, name, field[0], int(field[1]), int(field[3]), cpu_s, int(field[19]))


def io_bytes(pid: int) -> int:
    """Return the bytes that a process has read and written by system calls; 0 if we may not read the counters."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines[:2])  # rchar, wchar
    except (OSError, ValueError, IndexError):
        return 0


def sleeps_in(pid: int, tid: int) -> str:
    """Return the kernel function in which a thread sleeps; "" if it runs, or if we lack permission to see this."""
    try:
        function = Path(f"/proc/{pid}/task/{tid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if function == "0" else function


def computes_on_gpu(pid: int, root: Path = Path("/")) -> bool:
    """Return whether a process has initialized CUDA: it then has the driver's device for unified memory open."""
    try:
        return any(_link_target(fd) == _CUDA for fd in (root / f"proc/{pid}/fd").iterdir())
    except OSError:  # it has ended, or we may not look
        return False


def _link_target(fd: Path) -> str:
    """Return what an open descriptor leads to; empty if it was closed meanwhile."""
    try:
        return os.readlink(fd)
    except OSError:
        return ""


def list_descendants(ranks: Iterable[int]) -> dict[int, list[ProcessStat]]:
    """Return, for each of these processes, its descendants and the other processes of its session."""
    everybody = {int(name): seen for name in os.listdir("/proc") if name.isdigit() and (seen := read_stat(int(name)))}
    found: dict[int, list[ProcessStat]] = {rank: [] for rank in ranks}
    for seen in everybody.values():
        owner = _owning_rank(seen, everybody, found)
        if owner is not None and seen.state != "Z" and not _is_python_own(seen.pid):
            found[owner].append(seen)
    return found


def _owning_rank(
    seen: ProcessStat, everybody: dict[int, ProcessStat], ranks: dict[int, list[ProcessStat]]
) -> int | None:
    if seen.pid in ranks:
        return None
    above: ProcessStat | None = seen
    for _ in range(64):  # as deep as anybody goes; pids that are reused while we look could make a circle
        if above is None or above.parent <= 1:
            break
        if above.parent in ranks:
            return above.parent
        above = everybody.get(above.parent)
    return seen.session if seen.session in ranks else None


def _is_python_own(pid: int) -> bool:
    try:
        return any(word in Path(f"/proc/{pid}/cmdline").read_bytes() for word in _NOT_TRAINING)
    except OSError:
        return True  # it has just ended
