"""A request of the agent that the ranks finish their step and hand over what only leaving ranks hold, and its answer."""

import threading


class HandOverRequest:
    """Is asked by the thread that hears the agent, and answered by the main thread between two steps."""

    def __init__(self) -> None:
        self.leaving: tuple[int, ...] | None = None  # ranks that are about to leave; None: nothing is asked
        self._done = threading.Event()

    def reset(self) -> None:
        self.leaving = None
        self._done.clear()

    def ask(self, leaving: tuple[int, ...], within_s: float) -> None:
        """Ask, and wait until it is done, for so long at most."""
        self.leaving = leaving
        self._done.wait(within_s)

    def finish(self) -> None:
        self._done.set()


HAND_OVER = HandOverRequest()
