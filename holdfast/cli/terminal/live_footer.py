"""The footer of `holdfast run` on a terminal: one line below all output that says what the job does now."""

import contextlib
import os
import stat
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli.terminal.quantity_text import ettr_said, incidents_text, phase_said, step_said
from holdfast.core.terminal_sanitizer import strip_controls
from holdfast.decoding import from_json
from holdfast.wire import controller_request
from holdfast.wire.controller_request import ControllerNotRunning

_STDOUT, _STDERR = 1, 2
_ASK_S = 1.0
_DUTY = 20  # of a large job that takes long to answer, the controller is asked for less than a twentieth of the time
_ANSWER_S = 2.0
_RATE_S = 15.0  # over which the rate of steps is taken
_CLOSE_S = 1.0  # a terminal that is stopped (Ctrl-S) is not waited for
_COLOURS = {"training": "32", "stopping": "31", "probing": "35", "pausing": "34", "held": "34"}
_ERASE = b"\r\x1b[K"
_GAP = "  "


class FooterLine:
    """Draws the footer. It leaves the cursor at the start of the line, so that the next drawing overwrites an echoed
    ^C."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drawn = self._closed = False
        self._words: tuple[str, str] = "", ""

    def set_words(self, head: str, rest: str) -> None:
        """Show this text from now on; `head` may contain colours."""
        self._words = head, rest
        if self._lock.acquire(blocking=False):  # else whoever writes draws it
            try:
                self._erase()
                self._draw()
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Remove the footer while the caller writes whole lines to the terminal, and draw it again afterwards."""
        with self._lock:
            self._erase()
            yield
            self._draw()

    def close(self) -> None:
        """Erase the footer for good."""
        self._closed = True
        if self._lock.acquire(timeout=_CLOSE_S):
            self._erase()
            self._lock.release()

    def _erase(self) -> None:
        if self._drawn:
            self._drawn = False
            self._write(_ERASE)

    def _draw(self) -> None:
        head, rest = self._words
        try:
            behind = os.tcgetpgrp(_STDERR) != os.getpgrp()  # another job of the shell has the terminal
            width = os.get_terminal_size(_STDERR).columns
        except OSError:
            return
        if behind or not head or self._closed:
            return
        head = cut_columns(head, width - 1)
        rest = cut_columns(f"{_GAP}{rest}" if rest else "", width - 1 - count_columns(head))
        colour = "" if os.environ.get("NO_COLOR") else _COLOURS.get(head.partition(" ")[0], "33")
        head = f"\x1b[{colour}m{head}\x1b[m" if colour else head
        self._drawn = True
        self._write(f"{head}{rest}\r".encode())

    def _write(self, content: bytes) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone, not the wish to train
            os.write(_STDERR, content)


_shown: FooterLine | None = None  # a process has one terminal


def make_room() -> contextlib.AbstractContextManager[None]:
    """Return a context in which to write lines to the terminal; a footer, if there is one, stays below them."""
    return _shown.lifted() if _shown else contextlib.nullcontext()


def can_have_footer() -> bool:
    """Return whether stderr is a terminal that can move its cursor, and stdout is the same terminal or a file, not a
    pipe."""
    if not os.isatty(_STDERR) or os.environ.get("TERM", "dumb") in ("", "dumb"):
        return False
    if os.isatty(_STDOUT):
        return os.path.samestat(os.fstat(_STDOUT), os.fstat(_STDERR))
    try:
        return stat.S_ISREG(os.fstat(_STDOUT).st_mode)  # a pipe may lead to the same terminal, as that of tee
    except OSError:
        return False


@contextlib.contextmanager
def show_footer(run_dir: Path) -> Iterator[None]:
    """Show the footer while the block runs, if there is a terminal for it."""
    global _shown  # noqa: PLW0603 - see there
    if not can_have_footer():
        yield
        return
    _shown = line = FooterLine()
    over = threading.Event()
    threading.Thread(target=_follow_job, args=(run_dir, line, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()
        _shown = None
        line.close()


def _follow_job(run_dir: Path, line: FooterLine, over: threading.Event) -> None:
    meter = JobMeter()
    pause_s = _ASK_S
    while not over.wait(pause_s):
        asked_at = time.monotonic()
        try:
            content = controller_request.fetch(run_dir, "/api/v1/status", wait_s=_ANSWER_S)
            status: dict[str, Any] = from_json(content, dict[str, Any])
        except (ControllerNotRunning, msgspec.DecodeError):
            status = {}
        now = time.monotonic()
        pause_s = max(_ASK_S, _DUTY * (now - asked_at))
        words = meter.describe_job(now, status)
        if not over.is_set():
            line.set_words(*words)


class JobMeter:
    """Measures what a status does not tell: for how long the job has been in its phase, and its rate of steps."""

    def __init__(self) -> None:
        self._phase, self._since = "", 0.0
        self._steps: deque[tuple[float, int]] = deque()

    def describe_job(self, now: float, status: dict[str, Any]) -> tuple[str, str]:
        """Return two texts: the phase of the job, and details. In training, these are step, rate, ETTR and incidents;
        in other phases, first what the job waits for. `status` is empty if no controller answers."""
        phase = "starting" if not self._phase else "no controller"
        if status:
            phase = phase_said(status)
        if phase != self._phase:
            self._phase, self._since = phase, now
            self._steps.clear()
        if not status:
            return f"{phase} {now - self._since:.0f} s", ""
        if phase != "training":
            told = _describe_wait(status)
            return f"{phase} {now - self._since:.0f} s", strip_controls(_GAP.join((told, *_describe_past(status))))
        rate = self._step_rate(now, int(status["step"]))
        made = [step_said(status["step"], status.get("since", "")), *([rate] if rate else [])]
        return phase, strip_controls(_GAP.join((*made, *_describe_past(status))))

    def _step_rate(self, now: float, step: int) -> str:
        if self._steps and step < self._steps[-1][1]:
            self._steps.clear()
        self._steps.append((now, step))
        while self._steps[0][0] < now - _RATE_S:
            self._steps.popleft()
        (since, first), (until, last) = self._steps[0], self._steps[-1]
        return f"{(last - first) / (until - since):.3g} steps/s" if last > first else ""


def _describe_wait(status: Mapping[str, Any]) -> str:
    """Say what a job without steps waits for: a person, the restore of state on some nodes, or what its status says."""
    if status.get("asking"):
        return f"holdfast approve or stop: {status['asking']}"
    seated = [node for node in status["nodes"] if node["ranks"]]
    restoring = sum(node["phase"] == "restore" for node in seated)
    if status["phase"] == "starting" and restoring:
        return f"state is being restored on {restoring} of {len(seated)} nodes"
    return str(status["now"])


def _describe_past(status: Mapping[str, Any]) -> Iterator[str]:
    if status["ettr"] is not None:
        yield ettr_said(status["ettr"], status.get("at_most", ""))
    if status["incidents"]:
        now, past = status.get("incident_now"), status["last_incident"]
        last = f", now: {now}" if now else f", last: {past}" if past else ""
        yield f"{incidents_text(status['incidents'], status.get('failures', 0))}{last}"


def count_columns(text: str) -> int:
    return sum(_columns_of(letter) for letter in text)


def cut_columns(text: str, most: int) -> str:
    """Return as much of a line as fits into `most` columns; an ellipsis shows that it was cut."""
    text = text.replace("\n", " ").replace("\t", " ")
    if count_columns(text) <= most:
        return text
    kept, left = "", most - 1
    for letter in text:
        left -= _columns_of(letter)
        if left < 0:
            break
        kept += letter
    return f"{kept}…" if most > 0 else ""


def _columns_of(letter: str) -> int:
    if unicodedata.combining(letter) or unicodedata.category(letter) == "Cf":
        return 0
    return 2 if unicodedata.east_asian_width(letter) in ("W", "F") else 1
