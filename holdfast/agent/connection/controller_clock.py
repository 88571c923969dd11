"""The controller's time as this node knows it: the monotonic clock, plus an offset set at each welcome."""

from holdfast.agent.agent_clock import AgentClock


class ControllerClock:
    """Converts this node's monotonic time to the controller's time, even if someone sets the machine's clock."""

    def __init__(self, clock: AgentClock) -> None:
        self._clock = clock
        self.known = False  # until a controller has told its time, the machine's own is all there is
        self.offset_s = clock.wall() - clock.monotonic()  # what to add to an instant of the steady clock

    def on_welcome(self, at: float) -> None:
        self.offset_s, self.known = at - self._clock.monotonic(), True

    def wall_s(self) -> float:
        """Return the controller's time minus this machine's wall-clock time; 0 before the first welcome."""
        return self._clock.monotonic() + self.offset_s - self._clock.wall() if self.known else 0.0
