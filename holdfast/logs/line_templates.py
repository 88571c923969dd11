"""Condenses gigabytes of log into a few hundred kinds of lines, each with its count, place, and nearby lines.

Works like Drain: lines with the same number of words and the same beginning are compared word by word, and words that
differ become wildcards. We measured the package drain3 and did not take it: it needs 20 µs per line, has had no release
since 2022, pins old versions of two other packages, and keeps no surrounding lines. Most lines of a log differ from an
earlier line only in digits. So each block is counted without digits by fast built-in loops, and only new lines are
compared.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import eq

from holdfast.core.log_analysis.failure_catalog import lines_containing

_BLOCK = 2 << 20  # bytes taken apart at once
_LINE = 2048  # bytes of a line that are looked at
_KNOWN = 30_000  # lines without digits that are remembered
_KEY = 512  # if they are no longer than this
_LEAF = 24  # kinds that begin alike
_KINDS, _ALARMS = 2500, 4000  # in all; those that look like trouble may be more
_FRESH = 6_000  # new lines of a block that are looked at; of more, so many
_HELD, _HELD_ALARMS = 6 << 20, 12 << 20  # bytes of lines around others
_WORDS = 40
_BEFORE, _AFTER = 2, 3  # lines kept around one
_STACK = 60  # and so many more that are indented, as those of a traceback are
_TIMES = 3  # that what looks like trouble is kept with its surroundings
_ALIKE = 0.6

_DIGITS = b"0123456789"
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\b(?=[a-fA-F]*\d)[0-9a-fA-F]{7,}\b|\d+(?:[.,:-]\d+)*")
_HEX = re.compile(rb"[0-9a-fA-F]{7,}")
_WORD_CUT = re.compile(rb"[\w+/=.~%-]+$")
_INDENTED = re.compile(rb"(?:\[?[\w.:/-]{1,40}\]?:?)? {2,}\S")  # behind a rank's or a pod's name, too
_ALARMING = (  # looked for one by one, which is ten times faster than one pattern that ignores case
    b"error", b"exception", b"traceback", b"fail", b"fatal", b"abort", b"kill", b"panic", b"xid", b"memory", b"corrupt",
    b"timeout", b"timed out", b"refused", b"denied", b"reset by", b"no space", b"quota", b"signal", b"segfault",
    b"assert", b" nan", b"=nan", b" inf ", b"=inf", b"unavailable", b"lost", b"not found", b"no such", b"cannot",
    b"unable", b"invalid", b"exceed", b"evict", b"preempt", b"cancel", b" ecc ", b"unreachable", b"mismatch", b"broken",
    b"closed", b"stopped", b"critical", b"undefined", b"unexpected", b"bus error", b"throttl", b"hung", b"missing",
    b"can't", b"dumped",
)  # fmt: skip


class LineWindow:
    """Consecutive lines of the log, kept around one line of interest."""

    __slots__ = ("first", "lines", "number", "wanted")

    def __init__(self, number: int, lines: list[bytes], wanted: int) -> None:
        self.first = number - len(lines) + 1
        self.number = number  # of the line they are kept for
        self.lines = lines
        self.wanted = wanted  # lines that are still to come

    def add_lines(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            if self.wanted <= 0:
                return
            self.lines.append(line)
            self.wanted -= not (len(self.lines) < _STACK and _INDENTED.match(line))


class LineKind:
    """One kind of line: lines that are alike, with their count and a sample."""

    __slots__ = ("alarming", "count", "first", "last", "sample", "windows", "words")

    def __init__(self, words: list[str], sample: bytes, number: int, alarming: bool) -> None:
        self.words: list[str | None] = list(words)  # None: they differ here
        self.sample = sample
        self.first = self.last = number
        self.count = 0
        self.alarming = alarming
        self.windows: list[LineWindow] = []

    def likeness(self, words: list[str]) -> float:
        same: int = sum(map(eq, self.words, words))
        return (same + self.words.count(None) / 2) / max(len(words), 1)

    def widen_words(self, words: list[str]) -> None:
        self.words = [was if was == word else None for was, word in zip(self.words, words, strict=True)]


class TemplateMiner:
    """Sorts the lines of a log into kinds, in the order of the log; its memory does not grow with the log."""

    def __init__(self) -> None:
        self.kinds: list[LineKind] = []
        self.lines = 0
        self.skipped = 0  # lines that were new like thousands of others and not looked at
        self.tail: list[bytes] = []
        self._rest = LineKind([], b"(other lines)", 0, False)
        self._known: dict[bytes, LineKind] = {}
        self._leaves: dict[tuple[bool, int, str, str], list[LineKind]] = {}
        self._open: list[LineWindow] = []
        self._held = 0
        self._in_key = False

    def add_lines(self, lines: list[bytes]) -> None:
        """Sort the next lines of the log into kinds. Lines are whole and have no line ends."""
        lines = self._tidy_lines(lines)
        for window in self._open:
            window.add_lines(lines)
        self._open = [window for window in self._open if window.wanted > 0]
        keys = [line.translate(None, _DIGITS) for line in lines]
        keys = [key if key in self._known else _drop_variables(line) for key, line in zip(keys, lines, strict=True)]
        counts = Counter(keys)
        last = dict(zip(keys, range(len(keys)), strict=True))
        first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        for key in self._choose_keys(counts, lines, first):
            kind = self._known.get(key) or self._find_kind(key, lines, first[key])
            kind.count += counts[key]
            kind.last = max(kind.last, self.lines + last[key] + 1)
            if kind.alarming and len(kind.windows) < _TIMES:
                self._look_around(kind, lines, first[key])
        self.lines += len(lines)
        self.tail = [*self.tail, *lines[-_STACK:]][-_STACK:]

    def _tidy_lines(self, lines: list[bytes]) -> list[bytes]:
        """Return the lines as a terminal shows them. Long lines are cut, and the lines of private keys are replaced:
        masking sees one line at a time, and would not recognize the lines inside a key."""
        if any(b"\r" in line for line in lines):
            lines = [_last_overwrite(line) for line in lines]
        if max(map(len, lines), default=0) > _LINE:
            lines = [_trim_line(line) if len(line) > _LINE else line for line in lines]
        if self._in_key or any(b"PRIVATE KEY-----" in line for line in lines):
            lines = [self._without_key(line) for line in lines]
        return lines

    def _without_key(self, line: bytes) -> bytes:
        begins = b"-----BEGIN" in line and b"PRIVATE KEY" in line
        ends = b"-----END" in line
        hidden = (self._in_key or begins) and not (begins and ends)
        self._in_key = (self._in_key or begins) and not ends
        return b"<private key>" if hidden else line

    def _choose_keys(self, counts: Counter[bytes], lines: list[bytes], first: dict[bytes, int]) -> Iterable[bytes]:
        """Return the keys of the lines to compare: all, or if too many are new, a sample of the new ones, mostly
        alarming."""
        fresh = [key for key in counts if key not in self._known]
        if len(fresh) <= _FRESH:
            return counts
        lower = {key: lines[first[key]].lower() for key in fresh}
        telling = set(lines_containing(list(lower.values()), _ALARMING))
        alarming = [key for key in fresh if lower[key] in telling]
        calm = [key for key in fresh if lower[key] not in telling]
        dropped = _thin_keys(calm, _FRESH // 3) | _thin_keys(alarming, _FRESH)
        self.skipped += sum(counts[key] for key in dropped)
        return [key for key in counts if key not in dropped]

    def _find_kind(self, key: bytes, lines: list[bytes], at: int) -> LineKind:
        words = replace_variables(lines[at].decode("utf-8", "replace")).split(None, _WORDS)
        kind = self._most_alike(words, lines[at], self.lines + at + 1)
        if len(kind.windows) == 0:
            self._look_around(kind, lines, at)
        if len(self._known) >= _KNOWN:
            self._known.clear()
        if len(key) <= _KEY:
            self._known[key] = kind
        return kind

    def _most_alike(self, words: list[str], line: bytes, number: int) -> LineKind:
        alarming = is_alarming(line)  # a place of its own: "state: failed" is much like "state: running"
        one, two = (*map(_constant_part, words[:2]), "", "")[:2]
        place = (alarming, len(words), one, two)
        leaf = self._leaves.get(place, [])
        best = max(leaf, key=lambda kind: kind.likeness(words), default=None)
        full = len(leaf) >= _LEAF or len(self.kinds) >= (_ALARMS if alarming else _KINDS)
        if best is not None and (full or best.likeness(words) >= _ALIKE):
            best.widen_words(words)
            return best
        if full:
            return self._rest
        kind = LineKind(words, line, number, alarming)
        self._leaves.setdefault(place, []).append(kind)
        self.kinds.append(kind)
        return kind

    def _look_around(self, kind: LineKind, lines: list[bytes], at: int) -> None:
        """Store the lines around this line in its kind, including indented traceback lines above and below it."""
        number = self.lines + at + 1
        if self._held > (_HELD_ALARMS if kind.alarming else _HELD) or any(
            w.first <= number < w.first + len(w.lines) for w in kind.windows
        ):
            return
        start = at
        while start > 0 and at - start < _STACK and _INDENTED.match(lines[start - 1]):
            start -= 1
        above = lines[max(0, start - _BEFORE) : at]
        above = above or self.tail[-_BEFORE:]
        window = LineWindow(number, [*above, lines[at]], _AFTER)
        window.add_lines(lines[at + 1 : at + 1 + _STACK + _AFTER])
        self._held += sum(map(len, window.lines))
        kind.windows.append(window)
        if window.wanted > 0:
            self._open.append(window)


def mine_log(chunks: Iterable[bytes | str]) -> TemplateMiner:
    """Read a log and sort its lines into kinds. Strings are whole lines; bytes may be cut anywhere."""
    miner = TemplateMiner()
    for lines in _read_blocks(chunks):
        miner.add_lines(lines)
    return miner


def _read_blocks(chunks: Iterable[bytes | str]) -> Iterator[list[bytes]]:
    held: list[bytes] = []
    size = 0
    for chunk in chunks:
        if isinstance(chunk, str):
            chunk = chunk.rstrip("\r\n").encode("utf-8", "replace") + b"\n"
        held.append(chunk)
        size += len(chunk)
        if size < _BLOCK:
            continue
        whole, _, rest = b"".join(held).rpartition(b"\n")
        if whole:
            yield whole.split(b"\n")
        held = [rest]
        size = len(rest)
        if (
            size >= _BLOCK
        ):  # a line without an end is not gathered for ever: of a progress bar the newest, else the head
            held, size = [rest.rpartition(b"\r")[2][:_LINE]], 0
    if left := b"".join(held).removesuffix(b"\n"):
        yield left.split(b"\n")


def _trim_line(line: bytes) -> bytes:
    """Cut a line that is too long, and drop the cut word: masking would not recognize half a secret."""
    return _WORD_CUT.sub(b"", line[:_LINE]) or b"(one long word)"


def _drop_variables(line: bytes) -> bytes:
    return _HEX.sub(b"", line).translate(None, _DIGITS)


def _last_overwrite(line: bytes) -> bytes:
    parts = [part for part in line.split(b"\r") if part.strip()]
    return next((part for part in parts if is_alarming(part)), parts[-1] if parts else b"")


def replace_variables(text: str) -> str:
    """Replace numbers and hashes with a placeholder, so that lines that differ only in these become equal."""
    return _VARIABLE.sub("<n>", text)


def is_alarming(line: bytes) -> bool:
    line = line.lower()
    return any(word in line for word in _ALARMING)


def _constant_part(word: str) -> str:
    return "*" if "<n>" in word or "/" in word else word


def _thin_keys(keys: Iterable[bytes], most: int) -> set[bytes]:
    """Return the keys to drop, taken evenly from the list, so that about `most` keys remain."""
    every = list(keys)
    stride = -(-len(every) // most)
    return {key for at, key in enumerate(every) if at % stride} if stride > 1 else set()
