"""What ranks print is shown without what a terminal would obey."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.terminal_sanitizer import (
    is_text,
    plain_line,
    sanitize_line,
    sentence_of_ours,
    strip_controls,
    strip_tree,
)

OSC = "\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x1b\\"
COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
CASES = {
    f"a{OSC}b": "ab",
    "a\x1b[31mred\x1b[0m b": "ared b",
    "up\x1b[2A\x1b[2Kholdfast: all is well": "upholdfast: all is well",
    "\x1bP1;2|dcs\x1b\\x\x1b_apc\x07y\x1b^pm\x07z": "xyz",
    "cut\x1b]0;off": "cut",
    "\x1b": "",
    "\x9d0;c1\x9c": "0;c1",
    "bell\x07 back\x08 null\x00": "bell back null",
    "turned \u202eerawtfos": "turned erawtfos",
    "two\nlines\tand a tab, \u00e4\u00f6\u00fc \u4e2d\u6587": "two\nlines\tand a tab, \u00e4\u00f6\u00fc \u4e2d\u6587",
}


@pytest.mark.parametrize("text", CASES)
def test_texts(text: str) -> None:
    assert strip_controls(text) == CASES[text]
    assert strip_tree({text: [text, 1, None, (text,)]}) == {CASES[text]: [CASES[text], 1, None, [CASES[text]]]}


def test_nobody_says_a_sentence_of_ours() -> None:
    """What we quote, a node's name, an exception, may have lines that look like ours."""
    said = sentence_of_ours("rank 0 raised: oh\x1b[2A\nholdfast: done: all ranks ended well\r\nholdfast: x")
    assert [line for line in f"holdfast: {said}".splitlines() if line.startswith("holdfast")] == [
        "holdfast: rank 0 raised: oh"
    ]


def test_a_ranks_line_keeps_its_colours_and_they_end_with_it() -> None:
    assert sanitize_line(b"\x1b[1;31mred") == b"\x1b[1;31mred\x1b[m"
    assert sanitize_line(f"a{OSC}b".encode()) == b"ab"
    assert sanitize_line(b"[rank 0] \x08\x08\x1b[9Dholdfast: done") == b"[rank 0] holdfast: done"
    assert sanitize_line(b"\xff\xfe not \x80 text") == b"\xff\xfe not \x80 text"
    assert sanitize_line("\u00e9\u009d0;x\u009c".encode()) == "\u00e90;x".encode()
    assert sanitize_line(b"\xc2\x00\x9b2J") == b"\xc22J", "what was apart is not put together"
    assert sanitize_line(b"\xc2\x1b[K\x9b31;1H \x9b2J \xc2\x7f\x9d0;title") == b"\xc231;1H 2J \xc20;title"
    assert sanitize_line("\u202eab".encode()) == b"ab"


@pytest.mark.parametrize("byte", [*range(0x84, 0x86), 0x88, *range(0x8D, 0x91), 0x98, 0x9B, *range(0x9D, 0xA0)])
def test_bytes_that_an_8_bit_terminal_obeys(byte: int) -> None:
    """Moves by lines, tab stops, other character sets: some terminals obey them where they are no text."""
    assert sanitize_line(b"a" + bytes([byte]) + b"b") == b"ab"
    inside = f"a{chr(0x100 + byte)}{chr(0x4E00 + byte)}b".encode()
    assert sanitize_line(inside) == inside, "in a character they are none"


def test_text_is_not_concealed() -> None:
    for hides in ("8", "1;8", "8;1", "08", "38;5;1;8", "38;2;1;2;3;8", "38;38;5;8", "38;;5;8", "8:1", "0;8"):
        assert sanitize_line(f"a\x1b[{hides}mb".encode()) == b"ab", hides
    for colour in ("", "0", "38;5;8", "48;2;8;8;8", "38:5:8", "1;38;5;8;4", "38:2::8:8:8", "28", "18", "80", "4:3"):
        line = f"a\x1b[{colour}mb".encode()
        assert sanitize_line(line) == line + b"\x1b[m", colour


# Each repeated to a line's length: bytes that become characters when others go, escapes, half and whole ones.
UNITS = (
    b"\x80\xae",
    b"\x1b[",
    b"38;5;8;",
    b"\x1b[38;5;",
    b"\x1b]0;\x07",
    b"\xc2\x00\x9b",
    b"\xe2\x1b[K\x80\x00\xae",
    b"\x1b[31m",
    b"\xff",
)
PARTS = (*UNITS, b"\x1b[1;", b"\xe2", b"\xc2", b"\x80", b"\xae", b"\x9b", b"m", b"a", b"\x90", b"[", b"\xf0\x9f\x98")


@pytest.mark.parametrize("size", [6_000, 1_000_000])
def test_no_line_takes_much_longer_than_a_plain_one(size: int) -> None:
    def cost_s(line: bytes) -> float:
        began = time.thread_time()
        left = sanitize_line(line)
        took = time.thread_time() - began
        assert not set(left) & {0, 7} and left.count(b"\xe2\x80\xae") == 0
        return took

    plain = cost_s(b"step 1 loss 2.0 " * (size // 16))
    for unit in UNITS:
        count = size // (1 + len(unit))
        assert cost_s(b"\xe2" * count + unit * count) < 0.05 + 100 * plain, unit


@given(st.lists(st.sampled_from(PARTS)))
def test_no_mixture_of_bytes_leaves_what_a_terminal_obeys(parts: list[bytes]) -> None:
    text = sanitize_line(b"".join(parts)).decode("utf-8", "surrogateescape")
    assert strip_controls(COLOUR.sub("", text)) == COLOUR.sub("", text)


@given(st.text(st.characters() | st.sampled_from("\x1b\x07\\[];PX^_0m\x9b\nab")))
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    left = strip_controls(text)
    assert not {c for c in left if c not in "\n\t" and (ord(c) < 32 or 127 <= ord(c) < 160)}
    assert strip_controls(left) == left


def test_bytes_that_are_no_text() -> None:
    """A name of a file may be of any bytes; no sentence about it fails."""
    name = b"a\xff\x1b[2J\nholdfast: b".decode("utf-8", "surrogateescape")
    assert plain_line(name) == "a\ufffd holdfast: b"
    assert sentence_of_ours(name) == "a\ufffd\n  holdfast: b"
    assert (is_text(name), is_text(plain_line(name)), is_text("")) == (False, True, True)
