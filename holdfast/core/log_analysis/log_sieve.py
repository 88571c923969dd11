"""Reduces a log of any length to the lines that may help a diagnosis, in bounded memory."""

from collections import Counter, deque

from holdfast.core.log_analysis.failure_catalog import STRUCTURE, FailureCatalog, RowPattern
from holdfast.core.log_analysis.line_prefixes import PrefixHabits, strip_prefixes
from holdfast.core.log_analysis.pattern_literals import DIGITS, PLAIN

_FOLLOWED = (b'file "', b"traceback (most recent")
_AFTER = 4  # lines after a frame: its source, a mark below it, and what was raised
_DULL = 50_000  # lines remembered as saying nothing
_TRIES = 16  # lines that differ only in numbers are tried this often
_ALIKE = 200  # of the first lines that differ only in numbers are kept
_KEPT = 10_000  # lines from the beginning, and as many of the last ones
_LINE_BYTES = 4096  # of a line are kept, from both ends
_TAIL = 40
_PROGRESS = (b"loss", b"it/s", b"s/it", b"iteration")
_LOOKED = 200  # lines of a chunk in which the last sign of progress is looked for
_GOING = 16  # of these are kept
WHOLE = 128 << 10  # bytes: a log up to this size is kept as it is


class LineSieve:
    """Keeps those lines of a log that tell about a failure. The log comes in chunks. Lines that differ only in digits
    are alike to the sieve, which judges only a few of them."""

    def __init__(self, catalog: FailureCatalog) -> None:
        self._catalog = catalog
        self._dull: set[bytes] = set()  # plain lines that say nothing
        self._maybe: dict[bytes, list[RowPattern]] = {}  # those that hold the needles of some rows
        self._tried: Counter[bytes] = Counter()  # how often none of these rows knew such a line
        self._telling: Counter[bytes] = Counter()  # those that are kept
        self._kept: list[tuple[int, bytes]] = []
        self._late: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)
        self._going: deque[tuple[int, bytes]] = deque(maxlen=_GOING)
        self._tail: deque[tuple[int, bytes]] = deque(maxlen=_TAIL)
        self.lines = 0

    def feed_chunk(self, chunk: bytes) -> None:
        plains = chunk.translate(PLAIN, DIGITS).split(b"\n")
        self._learn_lines(set(plains))
        wanted = self._maybe.keys() | self._telling.keys()
        places = [place for place, plain in enumerate(plains) if plain in wanted]
        lines = chunk.replace(b"\r", b"\n").split(b"\n")
        done = -1
        for place in places:
            if not self._is_telling(plains[place], lines[place]):
                continue
            last = place + (_AFTER if any(mark in plains[place] for mark in _FOLLOWED) else 0)
            for one in range(max(place, done + 1), min(last + 1, len(lines))):
                self._keep_line(self.lines + one, plains[one], lines[one])
                done = one
        self._note_progress(plains, lines)
        first = max(0, len(lines) - _TAIL)
        self._tail.extend((self.lines + i, _cut_line(lines[i])) for i in range(first, len(lines)))
        self.lines += len(lines)

    def kept_lines(self) -> list[tuple[int, str]]:
        """Return the lines about a failure, the last signs of progress and the last lines, each with its number."""
        return [
            (index, _decode_line(line)) for index, line in sorted({*self._kept, *self._late, *self._going, *self._tail})
        ]

    def _note_progress(self, plains: list[bytes], lines: list[bytes]) -> None:
        """Keep a chunk's last line that shows progress, because the job survived all errors before that line."""
        for place in range(len(plains) - 1, max(-1, len(plains) - _LOOKED), -1):
            if any(mark in plains[place] for mark in _PROGRESS):
                self._going.append((self.lines + place, _cut_line(lines[place])))
                break

    def _learn_lines(self, here: set[bytes]) -> None:
        fresh = list(here - self._dull - self._maybe.keys() - self._telling.keys())
        if len(self._dull) + len(fresh) > _DULL:
            self._dull.clear()
        for known in (self._maybe, self._telling):
            if len(known) > _DULL:
                known.clear()
                self._tried.clear()
                fresh = list(here - self._dull)
        for line, found in zip(fresh, self._catalog.index.find_literals(fresh), strict=True):
            if found:
                self._maybe[line] = self._catalog.rows_of_literals(found)
            else:
                self._dull.add(line)

    def _is_telling(self, plain: bytes, line: bytes) -> bool:
        if plain in self._telling:
            return True
        if plain not in self._maybe:
            return False  # was found to say nothing a moment ago
        if any(mark in plain for mark in STRUCTURE) or _is_known(_decode_line(_cut_line(line)), self._maybe[plain]):
            return True
        self._tried[plain] += 1
        if self._tried[plain] >= _TRIES:
            del self._maybe[plain], self._tried[plain]
            self._dull.add(plain)
        return False

    def _keep_line(self, index: int, plain: bytes, line: bytes) -> None:
        self._maybe.pop(plain, None)
        self._dull.discard(plain)
        self._telling[plain] += 1
        early = self._telling[plain] <= _ALIKE and len(self._kept) < _KEPT
        (self._kept if early else self._late).append((index, _cut_line(line)))


def sift_log(log: bytes, catalog: FailureCatalog) -> list[tuple[int, str]]:
    """Return the lines about a failure, each with its number. Of a short log, return all lines."""
    if len(log) <= WHOLE:
        return list(enumerate(_decode_line(_cut_line(line)) for line in log.replace(b"\r", b"\n").split(b"\n")))
    sieve = LineSieve(catalog)
    sieve.feed_chunk(log)
    return sieve.kept_lines()


def _is_known(line: str, rows: list[RowPattern]) -> bool:
    if any(known.pattern.search(line) for known in rows):
        return True
    anchored = [known for known in rows if known.anchored]
    text = strip_prefixes(line, PrefixHabits()).text if anchored else ""
    return any(known.pattern.search(text) for known in anchored)


def _cut_line(line: bytes) -> bytes:
    if len(line) <= _LINE_BYTES:
        return line
    return line[: _LINE_BYTES // 2] + b" ... " + line[-_LINE_BYTES // 2 :]


def _decode_line(line: bytes) -> str:
    return line.decode("utf-8", "replace")
