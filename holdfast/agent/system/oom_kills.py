"""Tells whether the kernel has OOM-killed a process in this node's own cgroup."""

from collections import deque
from pathlib import Path

from holdfast.agent.system.snapshot_memory import used_part

_LATELY_S = 10.0  # a process ends well after the kernel has counted its kill: it has much memory to give back
_PRESSED = 10.0  # percent of the last ten seconds in which all waited for memory: what is well is far below
_FULL = 0.97  # part of the memory in use
_FIRST_PIDS = 0xEFFFFFFC  # inode of the namespace in which a pid is what the kernel's log calls it
_V2, _V1 = ("sys/fs/cgroup", "memory.events"), ("sys/fs/cgroup/memory", "memory.oom_control")


class OomKills:
    """Reads the OOM kill counter at intervals, to tell a recent kill from older ones."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._counts: deque[tuple[float, int]] = deque()
        self._pressed = (0.0, "")  # when memory was last found scarce, and by what sign

    def count_now(self, now: float) -> None:
        if (count := count_oom_kills(self._root)) is not None:
            self._counts.append((now, count))
        elif sign := scarcity(self._root):
            self._pressed = now, sign
        while len(self._counts) > 1 and self._counts[1][0] <= now - _LATELY_S:
            self._counts.popleft()

    def has_recent(self) -> bool:
        """Return whether there was an OOM kill in the last seconds; False where there is no counter."""
        count = count_oom_kills(self._root)
        return count is not None and bool(self._counts) and count > self._counts[0][1]

    def scarcely(self, now: float) -> str:
        """Return in words a recent sign of scarce memory; "" if there is none, or if OOM kills are counted here."""
        if count_oom_kills(self._root) is not None:
            return ""
        at, sign = self._pressed
        return scarcity(self._root) or (sign if now - at <= _LATELY_S else "")


def scarcity(root: Path) -> str:
    """Return in words how scarce memory is; empty if there is enough or it is not known."""
    try:
        rows = (root / "proc/pressure/memory").read_text().splitlines()
        shares = [float(row.split("avg10=")[1].split()[0]) for row in rows if row.startswith("full avg10=")]
        if shares and shares[0] >= _PRESSED:
            return f"memory pressure was {shares[0]:.0f} %"
    except (OSError, ValueError, IndexError):
        pass  # a kernel without PSI
    try:
        used = used_part(root)
    except (OSError, KeyError, ValueError):
        return ""
    return f"{100 * used:.0f} % of the memory was in use" if used >= _FULL else ""


def knows_pids(root: Path) -> bool:
    """Return whether the kernel log uses the same pids as this process; in a container it does not."""
    try:
        return root != Path("/") or (root / "proc/self/ns/pid").stat().st_ino == _FIRST_PIDS
    except OSError:
        return True


def count_oom_kills(root: Path) -> int | None:
    """Return the number of OOM kills in the innermost cgroup; None without a counter, as in the root cgroup."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, name = _V1 if controllers else _V2
        for folder in (root / mount / path.lstrip("/"), root / mount):  # the second: within a container
            found = _read_count(folder / name)
            if found is not None:
                return found
    return None


def _read_count(path: Path) -> int | None:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    counts = [int(each[1]) for each in words if len(each) == 2 and each[0] == "oom_kill" and each[1].isdecimal()]
    return counts[0] if counts else None
