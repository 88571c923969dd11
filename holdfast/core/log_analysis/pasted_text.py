"""Undoes what web pages, terminals and editors do to a log that somebody pastes: escapes, line numbers, indentation."""

import html
import re
import string
from collections.abc import Sequence
from itertools import pairwise

_ESCAPED = re.compile(r"&(?:#x?[0-9a-fA-F]{2,5}|quot|lt|gt|amp|apos);")
_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "\N{NO-BREAK SPACE}": " "})
_NUMBER = re.compile(r"^\s{0,8}\[?(?P<number>\d{1,7})(?:\]|\s?\||[:.)]|(?=\s|$))")
_BYTES = re.compile(r"""^b(?P<quote>["'])(?P<text>.*)(?P=quote)$""")
_DIGITS = str.maketrans("", "", string.digits)
_BORDERS = tuple("|+-=*#_ │┃")
_BEGINS = re.compile(r'[A-Z]{4,}\b|\[|\d{4}-\d\d|Traceback|File "|[\w.]{0,80}(?:Error|Warning)\b')  # no line goes on so
_WIDTHS = range(60, 400)  # of terminals; longer lines of one length were cut by us
_SHAPES = 3  # lines that end at the width and differ not only in numbers
_HEAD = 4  # characters
_INSIDE = 0.6  # of these are broken inside a word; the others end with one
_MOST = 0.8  # of the lines must have a mark, so that it is somebody's and not the log's own
_FEW = 5  # lines, below which a mark may be chance
_FRAME = ('File "', "File: ")  # stands two columns to the right of what it belongs to


def restore_pasted(lines: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return these lines as the program wrote them, as far as possible. Joined lines have the index of the first."""
    lines = _unwrap([(index, _unescape(text)) for index, text in lines])
    texts = _strip_bytes(_dedent(_strip_numbers([text for _, text in lines])))
    return [(index, text) for (index, _), text in zip(lines, texts, strict=True)]


def _unescape(text: str) -> str:
    if "&" in text and _ESCAPED.search(text):
        text = html.unescape(text)
    return text if text.isascii() else text.translate(_QUOTES)


def _unwrap(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Join lines that a terminal has broken at its width. A text counts as broken if no line is wider than a usual
    terminal and most lines of full width seem to end within a word."""
    width = max((len(text) for _, text in lines), default=0)
    broken = {place for place, (_, text) in enumerate(lines[:-1]) if len(text) == width}
    inside = [place for place in broken if _is_broken(lines[place][1], lines[place + 1][1])]
    shapes = {lines[place][1].translate(_DIGITS) for place in inside}
    if width not in _WIDTHS or len(shapes) < _SHAPES or len(inside) < _INSIDE * len(broken):
        return lines
    joined: list[tuple[int, str]] = []
    for place, (index, text) in enumerate(lines):
        if place - 1 in broken:
            joined[-1] = (joined[-1][0], joined[-1][1] + text)
        else:
            joined.append((index, text))
    return joined


def _is_broken(text: str, after: str) -> bool:
    """Return whether a terminal may have broken this line within a word. `after` is the next line. If both lines begin
    alike, they are two lines of the program, and neither is broken."""
    alike = text[:_HEAD].translate(_DIGITS) == after[:_HEAD].translate(_DIGITS)
    ended = text[-1:] in _BORDERS or "%|" in text  # a bar of progress is as wide as the terminal
    return not (alike or ended or after[:1].isspace() or not after or _BEGINS.match(after))


def _strip_numbers(texts: list[str]) -> list[str]:
    """Remove line numbers, if most lines have one and most of them are consecutive."""
    found = [_NUMBER.match(text) for text in texts]
    numbers = [int(one["number"]) for one in found if one]
    filled = sum(1 for text in texts if text.strip())
    steps = sum(1 for before, after in pairwise(numbers) if after == before + 1)
    if len(numbers) < max(_FEW, _MOST * filled) or steps < _MOST * (len(numbers) - 1):
        return texts
    return [text[one.end() :] if one else text for text, one in zip(texts, found, strict=True)]


def _dedent(texts: list[str]) -> list[str]:
    """Remove the indentation that all lines share. If a text begins in the middle of a traceback, its frames stay
    indented by two."""
    filled = [text for text in texts if text.strip()]
    shared = min((len(text) - len(text.lstrip(" ")) for text in filled), default=0)
    if any(text[shared:].startswith(_FRAME) for text in filled):
        shared -= 2
    return [text[shared:] for text in texts] if shared > 0 else texts


def _strip_bytes(texts: list[str]) -> list[str]:
    """Remove b'...' around each line, if most lines were printed as Python bytes."""
    found = [_BYTES.match(text) for text in texts]
    if sum(1 for one in found if one) < max(_FEW, _MOST * sum(1 for text in texts if text.strip())):
        return texts
    return [one["text"] if one else text for text, one in zip(texts, found, strict=True)]
