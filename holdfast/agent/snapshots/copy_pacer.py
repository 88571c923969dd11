"""Paces copies to peers: through gaps between collectives where that keeps them new, else by `backup.duty` alone."""

import fcntl
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.snapshots.step_gap_watch import StepGapWatch
from holdfast.checkpoint.byte_pacer import PIECE_BYTES, BytePacer
from holdfast.checkpoint.peer_transport import TransportError
from holdfast.core.snapshots.floor_pins_and_copies import CopyRun
from holdfast.core.snapshots.gap_pacing import LEAST_PIECE_BYTES, CopyPacing, choose_pacing, fit_piece, rest_after
from holdfast.core.snapshots.recovery_floor_coordination import BackupLimits

_CLOCK = SystemClock()  # of real bytes on real links, beside beats that ranks write by it
_WAIT_S = 0.02  # at most at once: steps may begin early, and copies be given up
_DRAIN_S = 0.0005  # between looks at what a link has still queued
_SILENT_S = 10.0  # then a little is sent without a gap, or the receiver would give up
_COPIES = 5  # the newest, whose median speed is expected of the next one


class CancelablePacer(BytePacer):
    """A pacer that stops a transfer once its CopyRun is cancelled."""

    def __init__(self, pacer: BytePacer, run: CopyRun) -> None:
        super().__init__(pacer.bytes_s)
        self._pacer = pacer
        self.run = run

    def spend_bytes(self, count: int) -> None:
        self._pacer.spend_bytes(count)
        self.check()

    def check(self) -> None:
        if self.run.cancelled:
            raise TransportError("the transfer was given up for a newer one")


class GapPacer(CancelablePacer):
    """A pacer that lets pieces go while a gap is open in which they fit, whatever link they take."""

    def __init__(self, pacer: BytePacer, run: CopyRun, watch: StepGapWatch, speed_bytes_s: float) -> None:
        super().__init__(pacer, run)
        self._watch, self._speed = watch, speed_bytes_s
        self.sent_s = 0.0  # so long something was being sent, over whichever link
        self._active, self._since = 0, 0.0
        self._count_lock = threading.Lock()

    def admit_piece(self, link: socket.socket, left: int) -> int:
        asked_at = _CLOCK.monotonic()
        while True:
            self.check()
            now, most = _CLOCK.monotonic(), min(left, PIECE_BYTES)
            window = self._watch.find_window(now)
            left_s, queued = window.open_until - now, queued_bytes(link)
            if left_s > 0 and (count := fit_piece(left_s, self._speed, queued, most)):
                return count
            if now > asked_at + _SILENT_S:
                return min(most, LEAST_PIECE_BYTES)
            wait_s = _DRAIN_S if left_s > 0 and queued else left_s if left_s > 0 else window.again_at - now
            time.sleep(min(max(wait_s, _DRAIN_S), _WAIT_S))

    @contextmanager
    def sending(self) -> Iterator[None]:
        with self._count_lock:
            self._active += 1
            self._since = _CLOCK.monotonic() if self._active == 1 else self._since
        try:
            yield
        finally:
            with self._count_lock:
                self._active -= 1
                self.sent_s += 0.0 if self._active else _CLOCK.monotonic() - self._since


class CopyPacer:
    """Chooses the pacing of each copy, from the gaps of the steps and the speed of the copies before."""

    def __init__(self, limits: BackupLimits, watch: StepGapWatch) -> None:
        self._limits, self._watch = limits, watch
        self._bytes = BytePacer(limits.bytes_s)  # of all that this node sends
        self._speeds: deque[float] = deque(maxlen=_COPIES)
        self._pacing: CopyPacing | None = None  # of the newest copy
        self.rest_s = -1.0  # so long the next copy is to wait; below 0: as its time and `backup.duty` say

    def describe(self) -> str:
        """Return how the newest copy is paced: "gaps", or "duty" and why; "" before the first copy."""
        if self._pacing is None:
            return ""
        return "gaps" if self._pacing.gaps else f"duty: {self._pacing.why}"

    def begin_copy(self, run: CopyRun, count: int) -> CancelablePacer:
        """Return the pacer for a copy of `count` bytes to all peers."""
        limits, gaps = self._limits, self._watch.read_gaps()
        measured = median(self._speeds) if self._speeds else 0.0
        speed = min(measured, limits.bytes_s) if limits.bytes_s else measured
        self._pacing = choose_pacing(limits.pacing, gaps, limits.duty, count, speed)
        if not self._pacing.gaps:
            return CancelablePacer(self._bytes, run)
        return GapPacer(self._bytes, run, self._watch, measured)

    def end_copy(self, pacer: CancelablePacer, count: int, took_s: float) -> None:
        """Take note that a copy of `count` bytes is complete after `took_s`."""
        sent_s = pacer.sent_s if isinstance(pacer, GapPacer) else took_s
        self.rest_s = -1.0
        if isinstance(pacer, GapPacer):
            self.rest_s = rest_after(took_s, sent_s, self._watch.read_gaps().step_s, self._limits.duty)
        if sent_s > 0 and count:
            self._speeds.append(count / sent_s)


def queued_bytes(link: socket.socket) -> int:
    """Return how many bytes a link has taken and not yet delivered."""
    try:
        found: int = struct.unpack("i", fcntl.ioctl(link.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
    except OSError:
        return 0
    return found
