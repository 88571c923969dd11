"""The controller's time as this node knows it: the monotonic clock, plus an offset set at each welcome."""

import time


class ControllerClock:
    """Converts instants of this node to the controller's time, even if someone sets the machine's clock meanwhile."""

    def __init__(self) -> None:
        self.known = False  # until a controller has told its time, the machine's own is all there is
        self.offset_s = time.time() - time.monotonic()  # what to add to an instant of the steady clock

    def on_welcome(self, at: float) -> None:
        self.offset_s, self.known = at - time.monotonic(), True

    def wall_s(self) -> float:
        """Return what to add to the wall clock's present time to get the controller's; 0 before the first welcome."""
        return time.monotonic() + self.offset_s - time.time() if self.known else 0.0
