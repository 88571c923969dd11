"""The job's time: wall time that never runs backwards, not even from one controller to the next."""

import time
from collections.abc import Callable


class SteadyClock:
    """Wall time that never runs backwards, whatever NTP or a restart does, so that spans do not overlap."""

    def __init__(self, not_before: float = 0.0) -> None:
        self.ahead_s = max(time.time(), not_before) - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class JobClock:
    """The clock of a controller. All parts of the controller read the same one."""

    def __init__(self, make_clock: Callable[[float], Callable[[], float]]) -> None:
        self._make_clock = make_clock
        self._read = make_clock(0.0)

    def __call__(self) -> float:
        return self._read()

    @property
    def ahead_s(self) -> float | None:
        """The job's time minus this machine's monotonic time; None if the time is simulated."""
        return self._read.ahead_s if isinstance(self._read, SteadyClock) else None

    def continue_from(self, at: float) -> None:
        """From now on, never return a time before `at`, the time of the journal's last entry."""
        self._read = self._make_clock(at)
