"""Runs writes to one storage one at a time in a separate thread, so that hanging storage blocks nobody."""

import threading
import time
from collections.abc import Callable

import msgspec

from holdfast.checkpoint.storage_errors import StorageError, WriteGivenUpError

_LOOK_S = 0.2


class WriteOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a write, with a sentence for the user that says how it went."""

    step: int
    ok: bool
    detail: str
    url: str = ""  # of the checkpoint, where one was published
    bytes: int = 0
    took_s: float = 0.0
    behind: bool = False  # it was left out, because the one before it is still being written


class WritePulse:
    """Shows whether a write makes progress, and lets another thread give the write up. Once a write is given up, the
    snapshot that it reads may be overwritten. So a writer calls add_bytes once more after the last byte. This call
    fails if the write was given up, so overwritten data never counts as written."""

    def __init__(self) -> None:
        self.bytes = 0
        self.moved_at = time.monotonic()
        self.notes: list[str] = []  # what a person may want to know once
        self.waiting = False  # for rank 0 to begin: nothing was written yet
        self.passed_over = False  # a later step is due by now
        self.left_out = False  # nothing was written, and nothing will be
        self._given_up = False
        self._lock = threading.Lock()

    def add_bytes(self, count: int = 0) -> None:
        """Report progress of this many bytes. Raises WriteGivenUpError if the write was given up."""
        with self._lock:
            if self._given_up:
                raise WriteGivenUpError("the write was given up")
            self.bytes += count
            self.moved_at = time.monotonic()

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True


class WriteLane:
    """Runs the writes to one storage, one at a time. `say` gets each message for the user only once."""

    def __init__(self, url: str, say: Callable[[str], None], stall_s: float = 60.0, kind: str = "storage") -> None:
        self._url = url
        self._place = f"{kind} at {url}"
        self._say = say
        self._stall_s = stall_s
        self._said: set[str] = set()
        self._last: tuple[int, threading.Thread] | None = None
        self._pulse = WritePulse()

    @property
    def is_held_up(self) -> bool:
        """Return whether the last write still runs, be it given up or not. No other write can start until it ends."""
        return self._last is not None and self._last[1].is_alive()

    def give_up(self) -> None:
        """Give up the current write; it ends when it next reports progress."""
        self._pulse.give_up()

    def wait_idle(self, timeout_s: float) -> None:
        """Wait for the end of a write that was given up."""
        if self._last:
            self._last[1].join(timeout_s)

    def run(self, step: int, write: Callable[[WritePulse], str]) -> WriteOutcome:
        """Run `write`, which returns the checkpoint's URL or "". Return the outcome, also if storage fails or hangs."""
        if self._last and self.is_held_up and self._pulse.waiting:
            self._pulse.passed_over = True  # or ranks would wait for different steps, and none would ever be whole
            self._last[1].join(_LOOK_S)
        if self._last and self.is_held_up:
            why = f"{self._place} still holds up the write of step {self._last[0]}, so step {step} is left out"
            return WriteOutcome(step=step, ok=False, detail=why, behind=True)
        began_at = time.monotonic()
        pulse = self._pulse = WritePulse()
        found: list[WriteOutcome] = []

        def carry() -> None:
            try:
                url = write(pulse)
            except StorageError as e:
                found.append(WriteOutcome(step=step, ok=False, detail=f"step {step} was not written: {e}"))
            else:
                took_s = time.monotonic() - began_at
                done = f"step {step} was written to {url or self._url} in {took_s:.1f} s"
                detail = f"step {step} was left out: rank 0 has not begun it" if pulse.left_out else done
                found.append(WriteOutcome(step=step, ok=True, detail=detail, url=url, bytes=pulse.bytes, took_s=took_s))

        # Not of a pool: a pool's threads are waited for when the interpreter ends, and this one may never end.
        thread = threading.Thread(target=carry, name=f"holdfast-write-{step}", daemon=True)
        self._last = (step, thread)
        thread.start()
        self._wait_for(thread, pulse)
        self._say_notes(pulse)
        if found:
            return found[0]
        if thread.is_alive():
            why = f"{self._place} has taken nothing for {self._stall_s:g} s, so step {step} was given up"
        else:
            why = f"step {step} was not written: the writer crashed"
        return WriteOutcome(step=step, ok=False, detail=why)

    def _wait_for(self, thread: threading.Thread, pulse: WritePulse) -> None:
        while thread.is_alive():
            thread.join(min(_LOOK_S, self._stall_s))
            if time.monotonic() - pulse.moved_at > self._stall_s:
                pulse.give_up()
                return

    def _say_notes(self, pulse: WritePulse) -> None:
        for note in pulse.notes:
            if note not in self._said:
                self._said.add(note)
                self._say(note)
