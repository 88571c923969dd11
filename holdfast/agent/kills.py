"""Whether the kernel has killed for want of memory, in this node's own cgroup: the others' kills are not ours."""

from collections import deque
from pathlib import Path

_LATELY_S = 10.0  # a process ends well after the kernel has counted its kill: it has much memory to give back
_FIRST_PIDS = 0xEFFFFFFC  # inode of the namespace in which a pid is what the kernel's log calls it
_V2, _V1 = ("sys/fs/cgroup", "memory.events"), ("sys/fs/cgroup/memory", "memory.oom_control")


class Kills:
    """Looked at now and then; of what was counted before that, nobody knows whom it was about."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._counts: deque[tuple[float, int]] = deque()

    def look(self, now: float) -> None:
        if (count := counted(self._root)) is not None:
            self._counts.append((now, count))
        while len(self._counts) > 1 and self._counts[1][0] <= now - _LATELY_S:
            self._counts.popleft()

    def lately(self) -> bool:
        """Whether there was one in the last seconds; without a counter it is not known, and so not said."""
        count = counted(self._root)
        return count is not None and bool(self._counts) and count > self._counts[0][1]


def knows_pids(root: Path) -> bool:
    """Whether pids in the kernel's log are the ones that we know; in a container they are other processes'."""
    try:
        return root != Path("/") or (root / "proc/self/ns/pid").stat().st_ino == _FIRST_PIDS
    except OSError:
        return True


def counted(root: Path) -> int | None:
    """How many there were in the innermost cgroup; None: nobody counts there, as in the one that is above all."""
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
            found = _number(folder / name)
            if found is not None:
                return found
    return None


def _number(path: Path) -> int | None:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    counts = [int(each[1]) for each in words if len(each) == 2 and each[0] == "oom_kill" and each[1].isdecimal()]
    return counts[0] if counts else None
