"""The clock of an agent: its parts get the time from here, so that a simulation can supply its own time."""

import time
from typing import Protocol


class AgentClock(Protocol):
    """Tells the time of one machine, in seconds."""

    def monotonic(self) -> float:
        """Return the time of the monotonic clock, which nobody can set and all processes of the machine share."""

    def wall(self) -> float:
        """Return the time of the wall clock, which may jump because anybody may set it."""


class SystemClock:
    """The clocks of the machine that this process runs on."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
