"""The controller's time as this node knows it: the monotonic clock plus an offset, set by each Welcome message."""

from holdfast.agent.agent_clock import AgentClock

_LOOKS = 3


class ControllerClock:
    """Converts this node's monotonic time to the controller's time, even if someone sets the machine's clock."""

    def __init__(self, clock: AgentClock, *, same_machine: bool = False) -> None:
        """`same_machine` says that the controller runs on this machine, so that both read one monotonic clock."""
        self._clock, self._same_machine = clock, same_machine
        self.is_exact = False  # otherwise late by as long as the welcome was on its way
        self.known = False  # until a controller has told its time, the machine's own is all there is
        self.offset_s = clock.wall() - clock.monotonic()  # what to add to an instant of the steady clock

    def on_welcome(self, at: float, ahead_s: float | None = None) -> None:
        """Set the offset to `ahead_s` on the controller's own machine; else estimate it from the controller's time
        `at`."""
        self.is_exact = self._same_machine and ahead_s is not None
        self.offset_s = ahead_s if ahead_s is not None and self._same_machine else at - self._clock.monotonic()
        self.known = True

    def wall_s(self) -> float:
        """Return the offset from this machine's wall clock to the controller's time; 0 before the first Welcome."""
        if not self.known:
            return 0.0
        looks = [(self._clock.monotonic(), self._clock.wall(), self._clock.monotonic()) for _ in range(_LOOKS)]
        before, wall, after = min(looks, key=lambda look: look[2] - look[0])  # a busy machine may pause between two
        return (before + after) / 2 + self.offset_s - wall
