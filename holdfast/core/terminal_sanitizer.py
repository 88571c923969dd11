"""Sanitizer for text from others before it is shown: it removes everything that a terminal would obey.

Sequences that move the cursor or set the title or the clipboard, and characters that reverse the reading direction,
could make a console or a report show false text.
"""

import re
from typing import Any

# An escape sequence, whole or cut off: CSI; strings such as OSC and DCS with what they hold; all others.
_ESCAPE = r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~]?)"
_TURNS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_HARMFUL = re.compile(rf"{_ESCAPE}|[\x00-\x08\x0b-\x1f\x7f-\x9f{_TURNS}]")
# Of a rank's own lines colours stay: they end with the line. Bytes that are no text are half characters here.
# A sequence with the attribute 8 is removed: it conceals text. In the numbers of a colour (38;5;8) 8 is a colour.
_NUMBERED_COLOUR = r"0*[345]8;0*(?:5;[0-9]*+|2;[0-9]*+;[0-9]*+;[0-9]*+)"
_ATTRIBUTE = r"(?!0*8(?![0-9])|0*[345]8(?![0-9:]))[0-9]*+(?::[0-9]*+)*+"
_COLOUR = rf"\x1b\[(?:{_NUMBERED_COLOUR}|{_ATTRIBUTE})(?:;(?:{_NUMBERED_COLOUR}|{_ATTRIBUTE}))*+m"
_OBEYED = r"\udc84\udc85\udc88\udc8d-\udc90\udc98\udc9b\udc9d-\udc9f"
_CONTROLS = rf"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f{_TURNS}{_OBEYED}]"
_HARMFUL_SHOWN = re.compile(rf"(?!{_COLOUR})(?:{_ESCAPE}|{_CONTROLS})")
_COLOURED = re.compile(_COLOUR)
_NO_TEXT = re.compile("[\udc80-\udcff]")
_HALVES = re.compile("[\ud800-\udfff]")  # of characters: no encoding takes one alone
_PLAIN_AGAIN = "\x1b[m"
CUT = " ..."  # where a text was cut


def strip_controls(text: str) -> str:
    """Return the text without anything that a terminal would obey; line ends stay."""
    if text.isprintable():  # most are, and to see that takes a tenth of the time
        return text
    return _HARMFUL.sub("", text)  # once: no escape is left that a removal could complete


def sentence_of_ours(text: str) -> str:
    """Return our message, sanitized and with later lines indented, so that a text it quotes cannot pose as ours."""
    return _as_text(strip_controls(text)).replace("\n", "\n  ")


def is_text(text: str) -> bool:
    """Return whether every character is valid text. A file name from the system may contain bytes that are not."""
    return not _HALVES.search(text)


def plain_line(text: str) -> str:
    """Return a text of others as one line without anything that a terminal would obey."""
    return _as_text(strip_controls(text)).replace("\n", " ")


def plain_lines(text: str) -> list[str]:
    """Return the lines of a text of others without anything that a terminal would obey."""
    return _as_text(strip_controls(text)).split("\n")


def _as_text(text: str) -> str:
    """Return the text with U+FFFD in place of bytes that are no valid text. File names may contain such bytes."""
    return _HALVES.sub("\ufffd", text)


def cut_words(text: str, most: int) -> str:
    """Return the text cut to at most `most` characters, with a mark where it was cut."""
    return text if len(text) <= most else mark_cut(text[: most - len(CUT)])


def mark_cut(text: str) -> str:
    """Return a text whose end was cut off, with the mark for cut text in its place. A last word that may be incomplete
    is removed, unless half of the text would go with it."""
    words = text.rpartition(" ")[0]
    return f"{words if 2 * len(words) > len(text) else text}{CUT}"


def strip_tree(value: Any) -> Any:
    """Return a tree of dicts and lists with `strip_controls` applied to every text."""
    if isinstance(value, str):
        return strip_controls(value)
    if isinstance(value, dict):
        return {strip_tree(key): strip_tree(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strip_tree(inner) for inner in value]
    return value


def with_text(value: Any) -> Any:
    """Return a tree of dicts and lists with U+FFFD in place of bytes that are no valid text."""
    if isinstance(value, str):
        return _as_text(value)
    if isinstance(value, dict):
        return {with_text(key): with_text(inner) for key, inner in value.items()}
    return [with_text(inner) for inner in value] if isinstance(value, list | tuple) else value


def sanitize_line(line: bytes) -> bytes:
    """Return a rank's output line made safe for a shared console; colours stay and end with the line."""
    text = _HARMFUL_SHOWN.sub("", _decode_line(line))
    joined = _decode_line(_encode_text(text))  # bytes that were apart may be a character when what was between is gone
    if _HARMFUL_SHOWN.search(joined):  # its removal could join others, and so on: such bytes are shown as no text
        joined = _NO_TEXT.sub("\ufffd", text)
    return _encode_text(joined + _PLAIN_AGAIN if _COLOURED.search(joined) else joined)


def _decode_line(line: bytes) -> str:
    return line.decode("utf-8", "surrogateescape")


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
