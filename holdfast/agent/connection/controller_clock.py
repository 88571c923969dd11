"""The controller's time as this node knows it: by a steady clock, set when the controller welcomes us."""

import time


class ControllerClock:
    """The machine's own clock may be set while we run, which must not move a step or an alarm."""

    def __init__(self) -> None:
        self.known = False  # until a controller has told its time, the machine's own is all there is
        self.offset_s = time.time() - time.monotonic()  # what to add to an instant of the steady clock

    def on_welcome(self, at: float) -> None:
        self.offset_s, self.known = at - time.monotonic(), True

    def wall_s(self) -> float:
        """What to add to the machine's own clock as it is now."""
        return time.monotonic() + self.offset_s - time.time() if self.known else 0.0
