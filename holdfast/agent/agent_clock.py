"""The clock of an agent: its parts are given one, and no other module of theirs asks the machine for the time."""

import time
from typing import Protocol


class AgentClock(Protocol):
    """Tells the time of one machine, in seconds."""

    def monotonic(self) -> float:
        """Return an instant of the clock that nobody can set; the same for all processes of the machine."""

    def wall(self) -> float:
        """Return the date, which somebody may set at any time."""


class SystemClock:
    """The clocks of the machine that this process runs on."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
