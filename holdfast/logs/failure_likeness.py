"""Measures how alike two failures are, by the words of the alarming lines in their logs."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from holdfast.logs.line_templates import mine_log, replace_variables
from holdfast.logs.log_digest import rank_trouble

_LINES = 24  # that a failure is known by
_FEW = 3  # if fewer tell of trouble, the last lines count too
_LAST = 5
_LINE_CHARS = 240
_WORDS = 2  # a line of fewer tells nothing
_ALIKE = 0.5  # two lines with fewer words in common are different lines
_PATH = re.compile(r"(?<!\w)[~.]?(?:/[\w.@+-]+)+/?")
_WORD = re.compile(r"[A-Za-z_][\w.]*[A-Za-z]")
# Numbers that say what happened; all others are chance.
_CODE = re.compile(
    r"(?:exit ?code|error code|signal|status|errno|Xid(?: \([^)]{0,40}\))?)\W{0,3}?(-?\d{1,3})\b", re.IGNORECASE
)
# Lines that every failure below a launcher has.
_USUAL = re.compile(r"Traceback \(most recent|^\s*File \"|ChildFailedError|elastic_launch|torchrun|sys\.exit\(")


class LineWords:
    """The words of one line, without numbers and paths, and the codes in it."""

    __slots__ = ("codes", "words")

    def __init__(self, line: str) -> None:
        text = _PATH.sub(" ", line)
        self.codes = frozenset(_CODE.findall(text))
        self.words = frozenset(word.lower() for word in _WORD.findall(replace_variables(text)))

    def share_with(self, other: "LineWords") -> float:
        """Return the share of words that both lines have; 0 if it is small or the lines have different codes."""
        if self.codes != other.codes:
            return 0.0
        share = len(self.words & other.words) / max(1, len(self.words | other.words))
        return share if share >= _ALIKE else 0.0


def find_telling_lines(chunks: Iterable[bytes | str], mask: Callable[[str], str]) -> tuple[str, ...]:
    """Return the few log lines that identify this failure, gravest first, no two alike, each passed through `mask`."""
    miner = mine_log(chunks)
    troubles, last = rank_trouble(miner)
    found = list(_distinct_lines(troubles, mask, _LINES))
    if len(found) < _FEW:
        found = list(_distinct_lines([*found, *last], mask, _LAST))
    return tuple(found)


def _distinct_lines(lines: Iterable[str], mask: Callable[[str], str], most: int) -> Iterator[str]:
    seen: set[tuple[frozenset[str], frozenset[str]]] = set()
    for line in lines:
        text = mask(line.strip())[:_LINE_CHARS]
        said = LineWords(text)
        key = (said.words, said.codes)
        if len(said.words) < _WORDS or key in seen or _USUAL.search(line):
            continue
        seen.add(key)
        yield text
        if len(seen) >= most:
            return


def read_words(lines: Iterable[str]) -> list[LineWords]:
    return [LineWords(line) for line in lines]


def measure_likeness(one: Sequence[LineWords], other: Sequence[LineWords]) -> float:
    """Return how alike two failures are, from 0 to 1. Each line is compared with the other failure's most similar line,
    and the lower of the two means is returned, so that extra lines in either failure make the two less alike."""
    return min(_mean_share(one, other), _mean_share(other, one))


def _mean_share(lines: Sequence[LineWords], others: Sequence[LineWords]) -> float:
    best = [max((line.share_with(other) for other in others), default=0.0) for line in lines]
    return sum(best) / len(best) if best else 0.0
