"""Folds tracebacks on a console that many ranks share: the first cause is shown whole, later ones in one line.

When a rank fails, every other rank prints a traceback that says only this. The line names the log with all of it.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

_BEGINS = re.compile(rb"(?:  \+ Exception Group )?Traceback \(most recent call last\):")
_CHAINED = re.compile(rb"During handling of the above exception|The above exception was the direct cause")
_FRAME = re.compile(rb"frame #\d+: ")  # of C++, as torch prints them by the dozen
_MOST_LINES = 2_000
_HELD_S = 0.5  # for the rest of a traceback: another may follow from it
_LINE_BYTES = 400


class PrintedTraceback:
    """A traceback that is being printed."""

    def __init__(self, now: float) -> None:
        self.lines: list[bytes] = []
        self.last = b""  # which exception it was
        self.at = now

    def accepts_line(self, line: bytes) -> bool:
        """Whether this line belongs to the traceback."""
        if self.is_native:
            return _FRAME.match(line) is not None
        if self.last:
            return not line.strip() or _CHAINED.match(line) is not None
        return True

    @property
    def is_native(self) -> bool:
        return bool(self.lines) and _FRAME.match(self.lines[0]) is not None

    def add_line(self, line: bytes, now: float) -> None:
        self.lines.append(line)
        self.at = now
        if self.is_native:
            return
        if _CHAINED.match(line):
            self.last = b""
        elif len(self.lines) > 1 and line.strip() and not line[:1].isspace() and not _BEGINS.match(line):
            self.last = line


class TracebackFolding:
    def __init__(self, is_echo: Callable[[bytes], bool]) -> None:
        self._is_echo = is_echo
        self._open: dict[Path, PrintedTraceback] = {}
        self._first: dict[tuple[Path, bytes], str] = {}  # by generation and exception: whose was shown

    def fold_lines(self, path: Path, lines: list[bytes]) -> list[bytes]:
        """Return the lines to show now; lines of a traceback are held back until it ends."""
        own = b"[%s]: " % path.parent.name.replace("-", "").encode()  # as torch prefixes them; we do that, too
        found: list[bytes] = []
        for line in lines:
            found += self._fold_line(path, line.removeprefix(own))
        return found

    def _fold_line(self, path: Path, line: bytes) -> list[bytes]:
        now, held = time.monotonic(), self._open.get(path)
        done: list[bytes] = []
        if held is not None and (not held.accepts_line(line) or len(held.lines) >= _MOST_LINES):
            done, held = self.end_traceback(path), None
        if held is None and not (_BEGINS.match(line) or _FRAME.match(line)):
            return [*done, line]
        self._open.setdefault(path, held or PrintedTraceback(now)).add_line(line, now)
        return done

    def ended_paths(self) -> list[Path]:
        """Return the log files whose open traceback has had no new line for a while."""
        return [path for path, held in self._open.items() if time.monotonic() > held.at + _HELD_S]

    def end_traceback(self, path: Path) -> list[bytes]:
        """End the open traceback of this file and return it, whole or folded into one line; empty if there is none."""
        held = self._open.pop(path, None)
        if held is None:
            return []
        generation, rank = path.parent.parent, path.parent.name.replace("-", " ")
        if not any(other != path.parent for other in generation.glob("rank-*")):
            return held.lines
        where = b"%d lines in %s" % (len(held.lines), bytes(path))
        if held.is_native:
            return [b"(frames of C++: " + where + b")"]
        if not held.last:
            return held.lines
        if self._is_echo(held.last):
            return [held.last[:_LINE_BYTES] + b" (of a rank that lost another; " + where + b")"]
        first = self._first.setdefault((generation, held.last), rank)
        if first != rank:
            return [held.last[:_LINE_BYTES] + b" (as " + first.encode() + b"; " + where + b")"]
        return held.lines
