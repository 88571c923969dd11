"""Reads the host's memory, pressure, processor throttling, clock, the job's disks, and mounts that may hang."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from holdfast.agent.agent_clock import AgentClock
from holdfast.agent.sources import Signal
from holdfast.agent.sources.processor_throttling import ProcessorThrottling
from holdfast.agent.system.snapshot_memory import available_bytes
from holdfast.model.observation import Gauge

_WAIT_S = 1.0  # for all file systems together; what has not answered by then is read next time
_LARGE_BYTES = 100 << 30
_PRESSURES = (("memory", "full"), ("io", "full"), ("cpu", "some"))
Number = tuple[str, str, float]


class HostSource:
    """Reads the host. `paths` returns the paths or URLs of files that the job uses; object stores are skipped."""

    def __init__(
        self,
        clock: Callable[[], float],
        steady: AgentClock,
        offset_s: Callable[[], float],
        paths: Callable[[], list[str]],
        root: Path = Path("/"),
    ) -> None:
        self._clock = clock
        self._steady = steady
        self._offset_s = offset_s
        self._paths = paths
        self._root = root
        self._mounts: dict[str, WatchedMount] = {}
        self._throttling = ProcessorThrottling(root)

    def read(self) -> list[Signal]:
        now = self._clock()
        read = [
            *self._read_memory(),
            *self._read_pressure(),
            *self._throttling.read_numbers(),
            *self._read_disks(),
            ("clock.offset_s", "clock", abs(self._offset_s())),
        ]
        return [Gauge(name=name, of=of, value=value, at=now) for name, of, value in read]

    @property
    def disks(self) -> frozenset[str]:
        """The partitions and whole disks on which the paths lie, by the kernel's names."""
        return frozenset(name for mount in self._mounts.values() for name in mount.devices)

    def _read_memory(self) -> Iterator[Number]:
        try:
            yield "memory.available_gib", "memory", available_bytes(self._root) / (1 << 30)
        except (OSError, KeyError):
            return

    def _read_pressure(self) -> Iterator[Number]:
        for name, line in _PRESSURES:
            try:
                text = (self._root / "proc/pressure" / name).read_text()
            except OSError:
                continue  # a kernel without PSI
            for row in text.splitlines():
                fields = dict(part.split("=") for part in row.split()[1:])
                if row.startswith(line) and "avg60" in fields:
                    yield f"{name}.pressure", name, float(fields["avg60"])

    def _read_disks(self) -> Iterator[Number]:
        wanted = dict.fromkeys(path for url in self._paths() if (path := _local_path(url)))
        self._mounts = {path: self._mounts.get(path) or WatchedMount(path, self._root, self._steady) for path in wanted}
        for mount in self._mounts.values():
            mount.start_check()
        until = self._steady.monotonic() + _WAIT_S
        seen: set[int] = set()
        for mount in self._mounts.values():
            mount.answered.wait(max(0.0, until - self._steady.monotonic()))
            yield "mount.stuck_s", mount.path, mount.stuck_s
            if not mount.stuck_s and mount.device not in seen:  # several paths on one disk are told once
                seen.add(mount.device)
                yield from mount.read_numbers()


class WatchedMount:
    """One path, checked in a thread, because a network file system that is gone blocks every thread that accesses it.

    At most one such thread runs per path, however often the path is checked.
    """

    def __init__(self, path: str, root: Path, steady: AgentClock) -> None:
        self.path = path
        self._steady = steady
        self.device = 0  # its number
        self.devices: tuple[str, ...] = ()  # names of it and of the disk it is on
        self.answered = threading.Event()
        self._root = root
        self._asked_at: float | None = None
        self._found: os.statvfs_result | None = None

    def start_check(self) -> None:
        if self._asked_at is not None and not self.answered.is_set():
            return  # the last one is still waiting
        self._asked_at = self._steady.monotonic()
        self.answered.clear()
        threading.Thread(target=self._check_path, name=f"holdfast statvfs {self.path}", daemon=True).start()

    def _check_path(self) -> None:
        try:
            place = self._root / self.path.lstrip("/")
            self._found = os.statvfs(place)
            self.device = os.stat(place).st_dev
            self.devices = self.devices or _block_devices(self.device, self._root)
        except OSError:
            self._found = None  # not there yet, or no longer
        self.answered.set()

    @property
    def stuck_s(self) -> float:
        if self.answered.is_set() or self._asked_at is None:
            return 0.0
        return self._steady.monotonic() - self._asked_at

    def read_numbers(self) -> Iterator[Number]:
        found = self._found
        if found is None or not found.f_blocks:
            return
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        if self.path == "/dev/shm":
            yield "shm.free", self.path, free / total
            return
        yield "disk.free", self.path, free / min(total, _LARGE_BYTES)
        # A file system without a disk of this machine is no fault of this machine's.
        yield f"{'disk' if self.devices else 'mount'}.readonly", self.path, float(bool(found.f_flag & os.ST_RDONLY))
        if found.f_files:
            yield "disk.inodes_free", self.path, found.f_favail / found.f_files


def _local_path(url: str) -> str:
    parts = urlsplit(url)
    return os.path.abspath(parts.path) if parts.scheme in ("", "file") else ""


def _block_devices(number: int, root: Path) -> tuple[str, ...]:
    """Return the kernel's names of the partition and disk with this device number; empty if it is not a disk's."""
    link = root / "sys/dev/block" / f"{os.major(number)}:{os.minor(number)}"
    if not link.exists():
        return ()
    folder = link.resolve()
    whole = (folder.parent.name,) if (folder / "partition").exists() else ()
    return (folder.name, *whole)
