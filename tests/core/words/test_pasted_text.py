"""A log that somebody has pasted reads as the one that the program wrote."""

import html
from collections.abc import Callable

import pytest

from holdfast.core.log_analysis.pasted_text import restore_pasted

LOG = """2024-05-01 10:00:00 INFO it begins
Traceback (most recent call last):
  File "/w/train.py", line 3, in f
    if a < b and c > d:
TypeError: '<' not supported between instances of 'str' and "int"
[Tue May  1 10:00:01 2024] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."""


def restored(text: str) -> str:
    return "\n".join(line for _, line in restore_pasted(list(enumerate(text.split("\n")))))


def each(change: Callable[[int, str], str]) -> str:
    return "\n".join(change(number, line) for number, line in enumerate(LOG.split("\n"), 1))


@pytest.mark.parametrize(
    "pasted",
    [
        LOG,
        html.escape(LOG),
        LOG.replace(" 'str' ", " ‘str’ ").replace('"int"', "“int”"),
        each(lambda number, line: f"    {line}"),
        each(lambda number, line: f"{number:5d}  {line}"),
        each(lambda number, line: f"{number} | {line}"),
        each(lambda number, line: f"[{number + 1181}] {line}"),
        each(lambda number, line: f"b'{line}'"),
    ],
)
def test_what_pages_and_editors_add(pasted: str) -> None:
    assert restored(pasted) == LOG


def test_frames_keep_their_place() -> None:
    text = '  File "/w/train.py", line 3, in f\n    x()'
    assert restored(text) == restored(text.replace("  ", "    ", 1).replace("    x", "      x")) == text


def test_numbers_of_the_log_itself() -> None:
    for text in ("3: one\n1: two\n3: three\n0: four\n2: five", "10 steps\n11 steps", "5.5\n5.5\n5.5\n5.5\n5.5"):
        assert restored(text) == text


WORDS = "the collective operation on this communicator was aborted as another rank had closed its sockets".split()
WIDE = "\n".join(" ".join(WORDS[at:] + WORDS[:at] + WORDS[at:]) for at in range(5))


def broken(width: int) -> str:
    return "\n".join(line[at : at + width] for line in WIDE.split("\n") for at in range(0, len(line), width))


def test_a_terminal_broke_the_lines() -> None:
    for width in (80, 90, 110):
        assert restored(broken(width)) == WIDE, width
    assert restore_pasted(list(enumerate(broken(110).split("\n"))))[1][0] == 2, "the index of its first part"


def test_lines_of_one_width_that_nobody_broke() -> None:
    box = "\n".join(f"| {name:<76} |" for name in ("GPU Name", "Tesla", "No running processes", "end"))
    alike = "\n".join(f"formats: can't open input file {name * 48}" for name in "abcde")
    cut = "\n".join((name * 4100)[:4101] for name in WORDS)
    for text in (box, alike, WIDE, cut):
        assert restored(text) == text
