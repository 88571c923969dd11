"""Output made to be slow to judge: repeats of what rows look for, and floods of one line."""

import re
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from holdfast.core.detect.crash import alarm_of
from holdfast.core.log_analysis import (
    benign_lines,
    catalog_hits,
    launcher_summary,
    line_prefixes,
    root_cause,
    survived_errors,
    tracebacks,
)
from holdfast.core.log_analysis.failure_catalog import RowPattern
from holdfast.logs import catalog_files
from holdfast.model.observation import Exit

CHARS = 2000  # of a line are read, by agent/rank/last_words.py
BOUND_S = 0.5  # of processor time; the slowest takes a tenth of it
CATALOG = catalog_files.load_built_in()
KNOWN = {at: [known for known in CATALOG.known if known.row is row] for at, row in enumerate(CATALOG.rows)}


def filled(piece: str) -> str:
    return (piece * (CHARS // len(piece) + 1))[:CHARS]


def pieces(rows: list[RowPattern]) -> list[str]:
    """What a row looks for, and what its samples are made of: words, neighbours, beginnings."""
    found = [needle.decode() for known in rows for needle in known.needles]
    for sample in rows[0].row.all_samples[:2]:
        words = sample.split()[:12]
        found += [*words, *(f"{a} {b} " for a, b in pairwise(words)), f"{sample} "]
    return list(dict.fromkeys(piece for piece in found if piece))


def hostile(rows: list[RowPattern]) -> list[str]:
    heads = [needle.decode() for needle in rows[0].needles][:4]
    tails = [(head + filled(more))[:CHARS] for head in heads for more in ("a", "1 ", " ", "/")]
    return [filled(piece) for piece in pieces(rows)] + tails + [filled(one) for one in ("x", "1", "-", "Error: ", "a.")]


def took_s(lines: list[str], code: int = 1) -> float:
    exit = Exit(node="n0", generation=1, rank=0, code=code, at=1.0, words=tuple(lines))
    began = time.process_time()
    alarm_of(exit, CATALOG)
    return time.process_time() - began


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))])
def test_no_row_is_slow_on_a_line_made_for_it(part: int) -> None:
    slow = []
    for rows in [KNOWN[at] for at in KNOWN if at % 8 == part and KNOWN[at]]:
        lines = hostile(rows)
        for known in rows:
            worst_s, worst = max((_searched_s(known, line), line) for line in lines)
            if worst_s > BOUND_S:
                slow.append((round(worst_s, 2), known.row.klass, worst[:60]))
    assert not slow


def _searched_s(known: RowPattern, line: str) -> float:
    pattern = known.pattern  # compiled when it is first asked for
    began = time.process_time()
    pattern.search(line)
    return time.process_time() - began


NAMES = list(dict.fromkeys(row.raised for row in CATALOG.rows if row.raised))
FRAMES = list(dict.fromkeys(row.frames for row in CATALOG.rows if row.frames))
STACK_CHARS = 64 << 10


def test_there_are_such_rows() -> None:
    assert len(NAMES) > 20 and len(FRAMES) > 20


def test_no_stack_is_longer() -> None:
    """However many frames a script prints, and however long the names in them are."""
    frame = f'  File "/{"a" * 400}/train.py", line 3, in {"f" * 150}'
    lines = ["Traceback (most recent call last):", *[frame] * 500, "ValueError: odd"]
    [chain] = tracebacks.parse_tracebacks(line_prefixes.parse_lines(list(enumerate(lines)), 0))
    stack = chain.last.stack
    assert 200 * 300 < len(stack) < STACK_CHARS and stack.endswith("ff")


@pytest.mark.parametrize("pattern", NAMES, ids=lambda pattern: pattern[:40])
def test_no_type_of_an_exception_is_slow_to_look_at(pattern: str) -> None:
    """A script may name its exceptions as it likes; a name is as long as a line."""
    found = re.compile(pattern)
    words = re.findall(r"\w{3,}", pattern)
    names = [filled(piece)[:-1] + "!" for piece in (*words, "Error", "rror", "a", "A_", "1", "Exception")]
    longest_s = _longest_s(found.fullmatch, names)
    assert longest_s < BOUND_S


def stacks(pattern: str) -> list[str]:
    """Of what a pattern looks for in frames: long lines of it, short lines of it, and beginnings without an end."""
    words = list(dict.fromkeys(re.findall(r"[A-Za-z_]{3,}", pattern)))
    lines = [f"/{word}/{word}.py {word}" for word in words]
    made = ["\n".join(filled(piece) for _ in range(STACK_CHARS // CHARS)) for piece in (*lines, "a", "/", " .py ")]
    short = [*lines, *(f"/{a}/{b}.py " for a, b in pairwise(words)), "\n", "a.py b\n", "<frozen os> a\n"]
    made += ["\n".join([piece] * (STACK_CHARS // (len(piece) + 1))) for piece in short]
    return [f"{text[:STACK_CHARS]}\n?" for text in made]


@pytest.mark.parametrize("pattern", FRAMES, ids=lambda pattern: pattern[:40])
def test_no_frames_are_slow_to_look_at(pattern: str) -> None:
    """With as many as are told, made for a row."""
    longest_s = _longest_s(re.compile(pattern).search, stacks(pattern))
    assert longest_s < BOUND_S


def _longest_s(look: Callable[[str], object], texts: list[str]) -> float:
    longest = 0.0
    for text in texts:
        began = time.process_time()
        look(text)
        longest = max(longest, time.process_time() - began)
    return longest


@pytest.mark.parametrize(
    "line",
    [
        "Error: ",
        "[rank0]: ",
        *(
            pytest.param(line, marks=pytest.mark.slow)
            for line in ("RuntimeError: Error: ", "error", "--local_rank=1 ", "-", "a.")
        ),
    ],
)
def test_many_such_lines_are_judged_in_a_moment(line: str) -> None:
    took_s([filled(line)])  # patterns are compiled when they are first needed
    assert took_s([filled(line)] * 500) < 5.0, "it was 13 s for the first of these"


@pytest.mark.parametrize(
    "module", [benign_lines, root_cause, catalog_hits, survived_errors, line_prefixes, launcher_summary, tracebacks]
)
def test_no_pattern_of_ours_is_slow_on_a_long_line(module: object) -> None:
    ends = [filled(one)[:-1] + "?" for one in ("a", "1", " ", "-", "~", ".", ":", "[", "error", "ib0", "File ", "a.")]
    for name, pattern in vars(module).items():
        if isinstance(pattern, re.Pattern):
            began = time.process_time()
            for line in ends:
                pattern.search(line)
            assert time.process_time() - began < 2 * BOUND_S, name
