"""The catalog of failure messages: rows that say what a log line means, and the search for rows that match a line."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from holdfast.core.log_analysis.pattern_literals import (
    LineBlock,
    LiteralIndex,
    fold_line,
    required_literals,
    split_alternatives,
)

_LINE_CHARS = 4000  # of a line are looked at
UNKNOWN = "unknown_child_failure"

# What a failure is made of beside the words that rows know.
STRUCTURE = (
    b"traceback (most recent", b'file "', b"during handling of", b"direct cause", b"exitcode", b"rank      :",
    b"root cause", b"-- process ", b"first observed failure", b"terminated with", b"host      :",
)  # fmt: skip


class FailureClass(msgspec.Struct, frozen=True, kw_only=True):
    """One class of the failure taxonomy, with the group, action and hint that apply unless a row overrides them."""

    klass: str
    group: str
    action: str
    title: str
    hint: str = ""


class CatalogRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One catalog row: a pattern or exit code, the failure class it points to, and how much it proves."""

    klass: str
    source: str
    pattern: str = ""
    weight: int = 5  # 9 is proof, 5 a clear exception, 2 a mere symptom, 1 a launcher's summary
    # an echo says that somebody else failed first; a hint counts where nobody says anything plainly
    role: Literal["cause", "echo", "context", "hint"] = "cause"
    code: int | None = None  # without a pattern: speaks where no words do
    raised: str = ""  # only of an exception of this type
    stage: Literal["", "start", "training"] = ""  # only before any step was logged, or only after some were
    frames: str = ""  # only of a traceback with such a frame
    most_sure: float = (
        1.0  # confidence with such lines alone: their writer does not say why, and other causes look alike
    )
    witness: bool = False  # who writes such a line has looked at the machine: driver, monitor, scheduler
    needle: str | tuple[str, ...] = ()  # where the pattern does not say itself what it looks for
    group: str = ""
    action: str = ""
    sample: str = ""
    samples: tuple[str, ...] = ()
    hint: str = ""

    @property
    def all_samples(self) -> tuple[str, ...]:
        return (self.sample, *self.samples) if self.sample else self.samples


class Alternative(msgspec.Struct, frozen=True, array_like=True):
    """One alternative of a row's pattern, and its literals: each line that it matches contains at least one of them."""

    pattern: str
    literals: tuple[str, ...]


class RowPattern:
    """One alternative of a row's pattern, compiled on first use."""

    def __init__(self, row: CatalogRow, alternative: Alternative) -> None:
        self.row = row
        self.needles = tuple(literal.encode() for literal in alternative.literals)
        self.anchored = "^" in alternative.pattern  # may match only when what stands before the words is gone
        self._pattern = alternative.pattern

    @cached_property
    def pattern(self) -> re.Pattern[str]:  # most are never needed, and to compile them all takes a second
        return re.compile(self._pattern)

    @cached_property
    def raised(self) -> re.Pattern[str] | None:
        return re.compile(self.row.raised) if self.row.raised else None

    @cached_property
    def frames(self) -> re.Pattern[str] | None:
        return re.compile(self.row.frames) if self.row.frames else None


def find_alternatives(row: CatalogRow) -> tuple[Alternative, ...]:
    """Return the alternatives of a row's pattern, so that a line is matched only with alternatives whose literals are
    in the line. Raise ValueError if an alternative contains no literal and the row names none."""
    given = (row.needle,) if isinstance(row.needle, str) else row.needle
    if given:
        folded = tuple(fold_line(needle).decode() for needle in given)
        if not all(any(letter.isalpha() for letter in needle) for needle in folded):  # digits are not looked for
            raise ValueError(f"a needle of the pattern {row.pattern!r} has no letters: give a word")
        return (Alternative(row.pattern, folded),)
    parts = [(part, required_literals(part)) for part in split_alternatives(row.pattern)]
    if not all(literals for _, literals in parts):
        raise ValueError(f"nothing can be looked for first in the pattern {row.pattern!r}: give a needle")
    return tuple(Alternative(part, tuple(literal.decode() for literal in literals)) for part, literals in parts)


class FailureCatalog:
    """Rows and classes of the catalog. `found` are the alternatives of rows, if the caller has split them before."""

    def __init__(
        self,
        rows: tuple[CatalogRow, ...],
        classes: tuple[FailureClass, ...] = (),
        found: Mapping[CatalogRow, tuple[Alternative, ...]] | None = None,
        more: tuple[CatalogRow, ...] = (),
    ) -> None:
        self.more = more  # rows of the user's own
        self.rows = rows = (*rows, *more)
        self.classes = {klass.klass: klass for klass in classes}
        found = found or {}
        self.known = tuple(
            RowPattern(row, alternative)
            for row in rows
            if row.pattern
            for alternative in (found.get(row) or find_alternatives(row))
        )
        self._places = {id(known): place for place, known in enumerate(self.known)}
        self.codes = {row.code: row for row in rows if row.code is not None and not row.pattern}
        self._by_needle: dict[bytes, list[RowPattern]] = {}
        for known in self.known:
            for needle in known.needles:
                self._by_needle.setdefault(needle, []).append(known)
        self.index = LiteralIndex((*self._by_needle, *STRUCTURE))

    def class_of(self, row: CatalogRow) -> FailureClass:
        """Return the class of a row. A class that the taxonomy lacks is made from the row itself."""
        known = self.classes.get(row.klass)
        return known or FailureClass(
            klass=row.klass,
            group=row.group or "unknown",
            action=row.action or "run_diagnostics",
            title=row.klass.replace("_", " "),
        )

    def action_of(self, row: CatalogRow) -> str:
        return row.action or self.class_of(row).action

    def match_line(self, line: str) -> list[CatalogRow]:
        """Return the rows whose pattern matches this line. Other conditions of the rows are not checked."""
        line = line[:_LINE_CHARS]
        found = (known.row for known in self.candidate_rows([line]).get(0, ()) if known.pattern.search(line))
        return list({id(row): row for row in found}.values())

    def candidate_rows(self, lines: Sequence[str]) -> dict[int, list[RowPattern]]:
        """Return for each line, by index, the rows that may match because the line contains one of their literals."""
        plains = [fold_line(line[:_LINE_CHARS]).replace(b"\n", b" ") for line in lines]
        unlike = list(dict.fromkeys(plains))
        rows = {
            line: self.rows_of_literals(found)
            for line, found in zip(unlike, self.index.find_literals(unlike), strict=True)
            if found
        }
        return {place: rows[line] for place, line in enumerate(plains) if line in rows}

    def rows_of_literals(self, found: Iterable[bytes]) -> list[RowPattern]:
        """Return the rows that have one of these literals, in catalog order. This order decides between equal hits."""
        wanted = {id(known): known for needle in found for known in self._by_needle.get(needle, ())}
        return sorted(wanted.values(), key=lambda known: self._places[id(known)])


def lines_containing(lines: Sequence[bytes], wanted: Iterable[bytes]) -> list[bytes]:
    """Return the lines that contain one of the wanted literals."""
    many = LineBlock(lines)
    return [lines[place] for place in sorted({place for needle in wanted for place in many.lines_containing(needle)})]
