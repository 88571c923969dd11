"""Cgroups that chaos makes to take processor time, memory or disk bandwidth away from one process."""

import itertools
import os
from pathlib import Path

from holdfast.chaos import process_handles
from holdfast.chaos.injection_records import CannotInject, LeaveCgroup

_NAMES = {"cpu": "cpu", "memory": "memory", "io": "blkio"}  # of v2 and v1
_count = itertools.count()


class Cgroup:
    """One cgroup that chaos made for one process; `back` is the cgroup that the process came from."""

    def __init__(self, path: Path, back: Path, *, v2: bool) -> None:
        self.path, self.back, self.v2 = path, back, v2

    def leave_undo(self) -> LeaveCgroup:
        return LeaveCgroup(str(self.path), str(self.back))

    def write_setting(self, name: str, value: str) -> None:
        try:
            (self.path / name).write_text(value)
        except OSError as e:
            raise CannotInject(f"{self.path / name} cannot be set to {value}: {e.strerror}") from None

    def add_process(self, pid: int, born: int) -> None:
        with process_handles.ProcessHandle(pid, born):
            self.write_setting("cgroup.procs", str(pid))


def make_cgroup(controller: str, pid: int) -> Cgroup:
    """Make an empty cgroup for a process, which stays where it is. With v2 the new cgroup is a sibling of the process's
    present cgroup, with v1 a child."""
    back, v2 = _find_cgroup(controller, pid)
    # In v2 a cgroup with processes in it cannot have children with controllers, so ours stands beside it.
    parent = back.parent if v2 else back
    path = parent / f"holdfast-chaos-{os.getpid()}-{next(_count)}"
    try:
        path.mkdir()
    except OSError as e:
        raise CannotInject(f"no cgroup can be made in {parent} ({e.strerror}); this needs root") from None
    if v2 and controller not in (path / "cgroup.controllers").read_text().split():
        path.rmdir()
        raise CannotInject(f"the cgroup controller {controller} is not enabled in {parent}")
    return Cgroup(path, back, v2=v2)


def missing_reason(controller: str) -> str:
    """Return why no cgroup with this controller can be made here; empty if one can."""
    try:
        back, v2 = _find_cgroup(controller, os.getpid())
    except CannotInject as e:
        return str(e)
    parent = back.parent if v2 else back
    return "" if os.access(parent, os.W_OK) else f"no cgroup can be made in {parent}; this needs root"


def _find_cgroup(controller: str, pid: int) -> tuple[Path, bool]:
    mounts = _cgroup_mounts()
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if _NAMES[controller] in controllers.split(",") and _NAMES[controller] in mounts:
            return mounts[_NAMES[controller]] / path.lstrip("/"), False
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        if line.startswith("0::") and "" in mounts and line != "0::/":
            return mounts[""] / line[3:].lstrip("/"), True
    raise CannotInject(f"this kernel offers no cgroup controller {controller} here")


def _cgroup_mounts() -> dict[str, Path]:
    """Return where each v1 controller is mounted; the v2 hierarchy is stored under the empty name."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup2":
            found.setdefault("", Path(left.split()[4]))
        elif kind == "cgroup":
            for name in options.split(","):
                found.setdefault(name, Path(left.split()[4]))
    return found


def limit_cpu(group: Cgroup, share: float) -> None:
    """Limit the cgroup's processor time to this share of one core."""
    period_us = 100_000
    quota_us = max(1000, int(share * period_us))
    if group.v2:
        group.write_setting("cpu.max", f"{quota_us} {period_us}")
    else:
        group.write_setting("cpu.cfs_period_us", str(period_us))
        group.write_setting("cpu.cfs_quota_us", str(quota_us))


def limit_memory(group: Cgroup, limit_bytes: int) -> None:
    """Limit the cgroup's memory; the kernel kills a process in it that asks for more."""
    group.write_setting("memory.max" if group.v2 else "memory.limit_in_bytes", str(limit_bytes))


def limit_disk(group: Cgroup, path: Path, bytes_s: int) -> None:
    """Limit reads and writes that bypass the page cache, on the disk that holds `path`."""
    number = os.stat(path).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    whole = device.parent if (device / "partition").exists() else device
    try:
        numbers = (whole / "dev").read_text().strip()
    except OSError:
        raise CannotInject(f"{path} is on no disk of this host") from None
    if group.v2:
        group.write_setting("io.max", f"{numbers} wbps={bytes_s} rbps={bytes_s}")
    else:
        group.write_setting("blkio.throttle.write_bps_device", f"{numbers} {bytes_s}")
        group.write_setting("blkio.throttle.read_bps_device", f"{numbers} {bytes_s}")
