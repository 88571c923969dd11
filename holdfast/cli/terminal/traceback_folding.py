"""Folds tracebacks on a console that many ranks share. The first cause is shown whole, and each later traceback in one
line: when a rank fails, every other rank prints a traceback, or a C++ report of torch's threads, that only says that a
peer is gone. Reports with the same text become one line, which names the logs that have the full text."""

import re
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from holdfast.core.rank_ranges import format_ranks

_BEGINS = re.compile(rb"(?:  \+ Exception Group )?Traceback \(most recent call last\):")
_CHAINED = re.compile(rb"During handling of the above exception|The above exception was the direct cause")
_FRAME = re.compile(rb"frame #\d+: ")  # of C++, as torch prints them by the dozen
# How reports of torch's C++ begin, how their stacks do, and the other lines that stand inside of one.
_REPORT = re.compile(
    rb"(?:\[rank\d+\]:)?\[[EF]\d+ [\d:.]+ (?:ProcessGroup\w*|NCCL\w*|TCPStore|socket|Backend)\.[ch]pp:\d+\] "
    rb"|terminate called after throwing an instance of "
)
_FIRST_LINE = re.compile(rb"(?:\[rank\d+\]: )?(?:" + _BEGINS.pattern + rb"|" + _REPORT.pattern + rb")")
_STACK = re.compile(rb"Exception raised from \S+ at |frame #\d+: ")
_INSIDE = re.compile(
    rb'\s*$|  what\(\):  |nccl\w+Error: |Last error:|Fatal Python error: Aborted|(?:Current t|T)hread 0x|  File "'
    rb"|Extension modules: "
)
_NCCL = re.compile(rb"nccl\w+Error: |Last error:")  # what follows an exception of NCCL; after this one line of any kind
_LAST = b"Last error:"
_NUMBERS = re.compile(rb"0x[0-9a-f]+|\d+")
_MOST_LINES = 2_000
_MESSAGE_LINES = 12  # of a report, between its first line and its frames
_HELD_S = 0.5  # for the rest of a traceback: another may follow from it
_GATHER_S, _LATEST_S = 1.0, 5.0  # for other ranks that say the same: since the last, and since the first
_LINE_BYTES = 400


class PrintedTraceback:
    """A Python traceback, or a C++ report, of which a rank has printed only a part so far."""

    def __init__(self, now: float, native: bool) -> None:
        self.native = native
        self.lines: list[bytes] = []
        self.message: list[bytes] = []  # of a report: the newest lines, which belong to it if more of it follows
        self.last = b""  # which exception it was
        self.at = now

    def accepts_line(self, line: bytes) -> bool:
        """Return whether this line belongs, or may belong, to the traceback."""
        if self.native and _REPORT.match(line):
            return not self.message
        if self.native and not (_STACK.match(line) or _INSIDE.match(line)):
            return self.speaks and not _BEGINS.match(line) and len(self.message) < _MESSAGE_LINES
        if self.last and not self.native:
            more = _CHAINED.match(line) or _NCCL.match(line) or self.lines[-1].rstrip() == _LAST
            return not line.strip() or bool(more)
        return True

    @property
    def speaks(self) -> bool:
        """Return whether a C++ report is still in its message. Until its stack begins, any line may belong to it."""
        told = next((line for line in reversed(self.lines) if line.strip()), b"")
        return not _FRAME.match(told)

    def add_line(self, line: bytes, now: float) -> None:
        self.at = now
        told = any(rule.match(line) for rule in (_REPORT, _STACK, _INSIDE))
        if self.native and (not told or (self.message and not line.strip())):
            self.message.append(line)
            return
        self.lines += [*self.message, line]
        self.message = []
        if self.native:
            self.last = self.lines[0]
        elif _CHAINED.match(line):
            self.last = b""
        elif self.last:
            return
        elif len(self.lines) > 1 and line.strip() and not line[:1].isspace() and not _BEGINS.match(line):
            self.last = line


class SameReports:
    """Tracebacks of several ranks that say the same, so that one line can stand for all."""

    def __init__(self, now: float, says: bytes) -> None:
        self.says = says
        self.first_at = self.at = now
        self.paths: dict[Path, int] = {}  # log -> lines in it
        self.line = b""  # for one rank alone


class TracebackFolding:
    def __init__(self, is_echo: Callable[[bytes], bool], is_lost_peer: Callable[[Sequence[bytes]], bool]) -> None:
        self._is_echo = is_echo
        self._is_lost_peer = is_lost_peer
        self._echoes: dict[bytes, bool] = {}  # by what was said, without its numbers
        self._open: dict[Path, PrintedTraceback] = {}
        self._first: dict[tuple[Path, bytes], str] = {}  # by generation and exception: whose was shown
        self._same: dict[tuple[Path, bytes], SameReports] = {}  # by generation and exception

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
        if held is None and not (_BEGINS.match(line) or _REPORT.match(line) or _STACK.match(line)):
            return [*done, line]
        self._open.setdefault(path, held or PrintedTraceback(now, not _BEGINS.match(line))).add_line(line, now)
        return done

    def ended_paths(self) -> list[Path]:
        """Return the log files whose open traceback has had no new line for a while."""
        return [path for path, held in self._open.items() if time.monotonic() > held.at + _HELD_S]

    def end_traceback(self, path: Path) -> list[bytes]:
        """End the open traceback of this log, and return the lines to show now. The traceback is left out if it repeats
        another rank's, or only says that another rank failed."""
        held = self._open.pop(path, None)
        if held is None:
            return []
        generation, rank = path.parent.parent, path.parent.name.replace("-", " ")
        if not any(other != path.parent for other in generation.glob("rank-*")) or not held.last:
            return held.lines + held.message
        if self._says_of_another(held):
            self._gather(path, held, SameReports(time.monotonic(), b"lost their peer"), b"of a rank that lost another")
            return held.message
        # Reports of C++ have the rank's number, times and addresses in them.
        key = _NUMBERS.sub(b"N", held.last) if held.native else held.last
        first = self._first.setdefault((generation, key), rank)
        if first != rank:
            same = SameReports(time.monotonic(), b"say the same as %s: %s" % (first.encode(), held.last[:_LINE_BYTES]))
            self._gather(path, held, same, b"as " + first.encode(), key)
            return held.message
        return [*(_fold_frames(held.lines, path) if held.native else held.lines), *held.message]

    def _says_of_another(self, held: PrintedTraceback) -> bool:
        """Return whether this traceback only says that another rank failed. Many ranks print the same text, so the
        answer for each text is kept."""
        told = [line for line in held.lines if not _FRAME.match(line)] if held.native else [held.last]
        key = _NUMBERS.sub(b"N", b"\n".join(told))
        if key not in self._echoes:
            if len(self._echoes) >= _MOST_LINES:
                self._echoes.clear()
            self._echoes[key] = self._is_lost_peer(told) if held.native else self._is_echo(held.last)
        return self._echoes[key]

    def _gather(self, path: Path, held: PrintedTraceback, new: SameReports, alone: bytes, key: bytes = b"") -> None:
        same = self._same.setdefault((path.parent.parent, key), new)
        same.at = new.at
        same.paths[path] = same.paths.get(path, 0) + len(held.lines)
        same.line = b"%s (%s; %s)" % (held.last[:_LINE_BYTES], alone, _where(same.paths[path], path))

    def take_same(self, over: int = 0) -> list[tuple[Path | None, bytes]]:
        """Return one line for each complete set of equal tracebacks, with the path of the log if only one rank printed
        the traceback, else None. A set is complete once no rank has joined it for a while, or once its generation has
        ended: generations up to the number `over` have."""
        now = time.monotonic()
        found: list[tuple[Path | None, bytes]] = []
        for (generation, key), same in list(self._same.items()):
            is_over = int(generation.name.removeprefix("gen-")) <= over
            if not is_over and now < min(same.at + _GATHER_S, same.first_at + _LATEST_S):
                continue
            del self._same[generation, key]
            if len(same.paths) == 1:
                found.append((next(iter(same.paths)), same.line))
                continue
            ranks = format_ranks([int(path.parent.name.removeprefix("rank-")) for path in same.paths])
            where = _where(sum(same.paths.values()), generation)
            found.append((None, b"%s %s (%s)" % (ranks.encode(), same.says, where)))
        return found


def split_before_report(line: bytes) -> list[bytes]:
    """Split a line in two where a traceback or a report begins, as after a progress bar that was cut off."""
    found = _FIRST_LINE.search(line, 1)
    return [line[: found.start()], line[found.start() :]] if found else [line]


def _where(lines: int, path: Path) -> bytes:
    return b"%d lines in %s" % (lines, bytes(path))


def _fold_frames(lines: list[bytes], path: Path) -> list[bytes]:
    """Return a C++ report with each of its stacks replaced by one line."""
    found: list[bytes] = []
    for are_frames, part in groupby(lines, lambda line: _FRAME.match(line) is not None):
        some = list(part)
        found += [b"(frames of C++: " + _where(len(some), path) + b")"] if are_frames else some
    return found
