"""Reads from sysfs whether the kernel slows processors down: events of thermal throttling, and lowered clocks."""

from collections.abc import Iterator
from pathlib import Path

from holdfast.agent.sources import read_number

_COUNTERS = ("core_throttle_count", "package_throttle_count")


class ProcessorThrottling:
    """Compares throttle counters with the last reading, and clock limits with the first reading, taken as intended."""

    def __init__(self, root: Path) -> None:
        cpus = root / "sys/devices/system/cpu"
        self._folders = sorted(cpus.glob("cpu[0-9]*/thermal_throttle"))
        self._events = self._count_events()
        limits = sorted(cpus.glob("cpufreq/policy*/scaling_max_freq"))
        self._limits = {path: start for path in limits if (start := read_number(path))}

    def read_numbers(self) -> Iterator[tuple[str, str, float]]:
        if self._folders:
            last, self._events = self._events, self._count_events()
            rose = sum(now > before for before, now in zip(last, self._events, strict=True))
            yield "cpu.throttled", "processors", float(rose)
        if self._limits:
            parts = [(read_number(path) or start) / start for path, start in self._limits.items()]
            yield "cpu.capped", "processors", 100.0 * max(0.0, 1.0 - min(parts))

    def _count_events(self) -> list[float]:
        return [sum(read_number(folder / name) or 0.0 for name in _COUNTERS) for folder in self._folders]
