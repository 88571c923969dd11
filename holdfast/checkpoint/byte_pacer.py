"""Paces what a keeper sends: to an average rate, and piece by piece where something decides when each may go."""

import contextlib
import socket
import threading
import time
from contextlib import AbstractContextManager

PIECE_BYTES = 256 << 10  # summed while it is in a core's cache, and while the other side has the piece before


class BytePacer:
    """Limits sending to an average rate; a pause of any length earns at most one second's worth of bytes."""

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s  # 0: as fast as it goes
        self._free_at = time.monotonic()
        self._lock = threading.Lock()  # links of several threads share it

    def spend_bytes(self, count: int) -> None:
        if self.bytes_s <= 0:
            return
        now = time.monotonic()
        with self._lock:
            free_at = self._free_at = max(self._free_at, now - 1.0) + count / self.bytes_s
        if free_at > now:
            time.sleep(free_at - now)

    def admit_piece(self, link: socket.socket, left: int) -> int:
        """Wait until something may be sent, and return how many of the `left` bytes may be sent at once."""
        return min(left, PIECE_BYTES)

    def sending(self) -> AbstractContextManager[object]:
        """Return the context in which a piece is sent, or the receiver's word awaited."""
        return contextlib.nullcontext()


UNPACED = BytePacer(0)
