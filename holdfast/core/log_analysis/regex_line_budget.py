"""Limits how much of a line a pattern may search, so that even the worst line takes only about a second."""

from collections.abc import Sequence
from math import factorial, prod
from re import _compiler as compiler  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]  # a pattern taken apart; there is no other door to it
from typing import Any

CHARS = (1000, 600, 300, 150)
_STEPS = 6e7  # up to thirty nanoseconds each
_REPEATS = (parser.MAX_REPEAT, parser.MIN_REPEAT, parser.POSSESSIVE_REPEAT)
Part = tuple[Any, Any]


def allowed_chars(pattern: str) -> int:
    """Return how many characters of a line this pattern may search; 0 if it is too slow for any length."""
    widths = _repeat_widths(parser.parse(pattern), None)
    return next((chars for chars in CHARS if _search_steps(widths, chars) <= _STEPS), 0)


def _search_steps(widths: list[int], chars: int) -> float:
    """Return how many steps a search takes if it tries every start and every way to split the rest between repeats."""
    return float(chars * prod(min(width, chars) for width in widths) / factorial(len(widths) + 1))


def _repeat_widths(tree: Sequence[Part], after: Part | None) -> list[int]:
    """Return the maximum lengths of those repeats in `tree` that have more than one possible end. `after` is the part
    of the pattern that follows `tree`. Of several alternatives, only the slowest counts."""
    found: list[int] = []
    for place, (op, value) in enumerate(tree):
        follows = tree[place + 1] if place + 1 < len(tree) else after
        if op in _REPEATS:
            least, most, inner = value
            found += _repeat_widths(inner, follows or (parser.ANY, None))
            if least != most and most != 1 and follows and not _has_one_end(inner, follows):
                found.append(most if most is not parser.MAXREPEAT else CHARS[0])
        elif op is parser.SUBPATTERN:
            found += _repeat_widths(value[-1], follows)
        elif op is parser.BRANCH:
            ways = [_repeat_widths(part, follows) for part in value[1]]
            widest: list[int] = max(ways, key=lambda widths: _search_steps(widths, CHARS[0]))
            found += widest
        elif op in (parser.ASSERT, parser.ASSERT_NOT):
            found += _repeat_widths(value[1], (parser.ANY, None))
        elif op is parser.ATOMIC_GROUP:
            found += _repeat_widths(value, follows or (parser.ANY, None))
    return found


def _has_one_end(inner: Any, follows: Part) -> bool:
    """Return whether the repeat can end in one place only: the character after it cannot occur inside it."""
    op, value = follows
    while op is parser.SUBPATTERN and len(value[-1]):
        op, value = value[-1][0]
    if op is not parser.LITERAL:
        return False
    one = compiler.compile(inner)
    return not any(one.match(letter) for letter in {chr(value).lower(), chr(value).upper()})
