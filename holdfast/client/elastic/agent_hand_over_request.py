"""The agent's request that ranks finish their step and hand over what only leaving ranks hold, and their answer."""

import threading


class HandOverRequest:
    """Is asked by the thread that hears the agent, and answered by the main thread between two steps."""

    def __init__(self) -> None:
        self.leaving: tuple[int, ...] | None = None  # ranks that are about to leave, (): all; None: nothing is asked
        self.serving = False  # the main thread makes steps, and looks here between two of them
        self.saves = False  # and it can write its layers to storage
        self._done = threading.Event()

    def reset(self) -> None:
        self.leaving, self.serving = None, False
        self._done.clear()

    def ask(self, leaving: tuple[int, ...], within_s: float) -> None:
        """Ask the main thread to hand over what the `leaving` ranks hold, and wait for at most `within_s` seconds. Do
        nothing if it makes no steps, or if no rank leaves and layers cannot be saved."""
        if self.serving and (leaving or self.saves):
            self.leaving = leaving
            self._done.wait(within_s)

    def finish(self) -> None:
        self.leaving = None
        self._done.set()


HAND_OVER = HandOverRequest()
