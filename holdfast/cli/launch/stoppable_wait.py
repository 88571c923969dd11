"""Lets a person end a controller that waits until another one has ended, and so has nothing to stop yet.

The supervisor passes a signal on to a controller that has handlers for it: one that listens, or that has left a note
that it waits. A controller whose wait is stopped leaves another note, which the supervisor reads when it is gone.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from holdfast.model.message_bounds import ExitCode
from holdfast.wire import run_and_node_specs

_NAME = "waiting.json"  # in the run directory


class WaitNote(msgspec.Struct, frozen=True, kw_only=True):
    pid: int  # of the controller
    stopped: ExitCode = 0  # the exit code for the supervisor; 0: it waits


class WaitStoppedError(Exception):
    """A signal has ended the wait; `number` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def code(self) -> int:
        return 128 + self.number


class StoppableWait:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.signals: list[int] = []  # that have come so far
        self._task: asyncio.Task[object] | None = None  # which waits

    def heed_signals(self) -> None:
        """From now on, note signals, and let them end a wait. Whoever takes them over gets those that came before."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        self.signals.append(number)
        if self._task:
            self._task.cancel()

    @contextlib.asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Wait in this block. Raise WaitStoppedError as soon as a signal comes."""
        self._task = asyncio.current_task()
        _write_note(self._run_dir, WaitNote(pid=os.getpid()))
        try:
            yield
        except asyncio.CancelledError:
            if not self.signals:
                raise
            assert self._task is not None
            self._task.uncancel()
            raise WaitStoppedError(self.signals[0]) from None
        finally:
            self._task = None
            forget_note(self._run_dir)


def note_stop(run_dir: Path, code: int) -> None:
    """Tell the supervisor that this controller has ended because its wait was stopped."""
    _write_note(run_dir, WaitNote(pid=os.getpid(), stopped=code))


def forget_note(run_dir: Path) -> None:
    (run_dir / _NAME).unlink(missing_ok=True)


def _write_note(run_dir: Path, note: WaitNote) -> None:
    with contextlib.suppress(OSError):  # then it takes more signals to end this
        run_and_node_specs.write_json(run_dir / _NAME, note)


def read_note(run_dir: Path, pid: int) -> WaitNote | None:
    """Return the note that this controller has left; None if it has left none."""
    try:
        found = run_and_node_specs.read_json(run_dir / _NAME, WaitNote)
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.pid == pid else None
