"""Rejects patterns that could take forever, and makes patterns from log lines."""

import re
from collections.abc import Iterable
from re import _parser as parser  # type: ignore[attr-defined]  # a pattern taken apart; there is no other door to it
from typing import Any

from holdfast.logs.line_templates import replace_variables

_LONGEST = 1000
_MANY = 300  # a repeat of up to more than this counts as endless
_ENDLESS = 4  # such repeats in one pattern
_REPEATS = (parser.MAX_REPEAT, parser.MIN_REPEAT, parser.POSSESSIVE_REPEAT)
_LOOKS = (parser.ASSERT, parser.ASSERT_NOT)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|(?<![\w/])(?:/[\w.@-]+){2,}")
_WORDS = 12  # of a line are enough to know it by
TOO_LONG = f"has a pattern of more than {_LONGEST} characters"
BAD_PATTERN = "has a bad pattern"
WILDCARD = "has a pattern that begins with a wildcard, which a search does not need"
TOO_ENDLESS = f"has a pattern with more than {_ENDLESS} endless repeats; give them limits, as in .{{0,80}}"
EXPLOSIVE = "has a pattern that may run for ever"
BACK_REFERENCE = "it refers back to one of its groups"
NESTED = "one repeat stands inside another"


def find_pattern_fault(pattern: str) -> str:
    """Return what is invalid or slow in a pattern; empty if nothing is. Search time must grow linearly with the log."""
    if len(pattern) > _LONGEST:
        return TOO_LONG
    try:
        tree = parser.parse(pattern)
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as e:
        return f"{BAD_PATTERN}: {e}"
    first = next((part for part in tree if part[0] is not parser.AT), None)
    if first is not None and _is_endless(*first) and first[1][2][0][0] is parser.ANY:
        return WILDCARD
    if not find_explosive_part(pattern) and _count_endless(tree, inside=False) > _ENDLESS:
        return TOO_ENDLESS
    return find_explosive_part(pattern)


def find_explosive_part(pattern: str) -> str:
    """Return the part of a valid pattern that can take exponential time on one line; empty if there is none."""
    try:
        _count_endless(parser.parse(pattern), inside=False)
    except ValueError as e:
        return f"{EXPLOSIVE}: {e}"
    return ""


def pattern_from_line(line: str) -> str:
    """Return a pattern for this line and for lines that differ from it only in numbers, quoted names and paths."""
    text = " ".join(line.split()[:_WORDS])
    marked = replace_variables(_QUOTED.sub("<q>", text))
    parts = (re.escape(part).replace(r"\ ", " ") for part in re.split(r"<n>|<q>", marked))
    return r".{1,80}?".join(parts).removesuffix(r".{1,80}?")


def _is_endless(op: Any, value: Any) -> bool:
    return op in _REPEATS and (value[1] is parser.MAXREPEAT or value[1] > _MANY)


def _count_endless(tree: Iterable[tuple[Any, Any]], *, inside: bool) -> int:
    """Return how many unbounded repeats can follow one another. Raises ValueError for a back reference or a nested
    repeat, because either can take exponential time."""
    count = 0
    for op, value in tree:
        if op is parser.GROUPREF:
            raise ValueError(BACK_REFERENCE)
        repeats = op in _REPEATS and value[1] != 1
        if repeats and inside and value[0] != value[1]:
            raise ValueError(NESTED)
        parts = [_count_endless(part, inside=inside or repeats) for part in _inner_parts(op, value)]
        count += max(parts, default=0) + _is_endless(op, value)
    return count


def _inner_parts(op: Any, value: Any) -> list[Any]:
    if op is parser.SUBPATTERN:
        return [value[-1]]
    if op is parser.BRANCH:
        return list(value[1])
    if op in _REPEATS:
        return [value[2]]
    if op in _LOOKS:
        return [value[1]]
    return [value] if op is parser.ATOMIC_GROUP else []
