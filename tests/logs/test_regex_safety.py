"""Patterns are bounded, or refused; those made of a line match it and its likes."""

import re

import pytest

from holdfast.logs import regex_safety
from holdfast.logs.regex_safety import find_pattern_fault, pattern_from_line


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a+)+b", regex_safety.NESTED),
        (r"(?:\w+\s*)*x", regex_safety.NESTED),
        (r"(?:a|b+){3,}x", regex_safety.NESTED),
        (r"(x?a*){40}", regex_safety.NESTED),
        (r"(?:\w{1,9})*x", regex_safety.NESTED),
        (".*boom", regex_safety.WILDCARD),
        ("^.+?boom", regex_safety.WILDCARD),
        ("a.*b.*c.*d.*e.*f", regex_safety.TOO_ENDLESS),
        (r"(boom) \1", regex_safety.BACK_REFERENCE),
        ("boom(", regex_safety.BAD_PATTERN),
        ("x" * 1001, regex_safety.TOO_LONG),
    ],
)
def test_patterns_that_are_refused(pattern: str, why: str) -> None:
    assert why in find_pattern_fault(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"Xid \(PCI:[\w:.]+\): 79\b",
        r"(?:CUDA|HIP) out of .*GiB",
        r"(?i)boom(?=ed)",
        "a.*b|c.*d|e.*f.{0,80}g.{0,80}h.*|.*i",
    ],
)
def test_patterns_that_will_do(pattern: str) -> None:
    assert find_pattern_fault(pattern) == ""


@pytest.mark.parametrize(
    ("line", "likes"),
    [
        ("ZorbError: zorblax 17 is out of phase (0x7f00)", ["ZorbError: zorblax 3 is out of phase (0xab12)"]),
        ("KeyError: 'layers.3.weight' in /workspace/a.py", ["KeyError: 'x' in /other/place/b.py"]),
        ("cannot open [weird] (file) {x} a.b*c", []),
        ("shard 00042 of 128: checksum 9f86d081884c7d65 differs", ["shard 1 of 2: checksum aaaaaaa1bbbbbb differs"]),
    ],
)
def test_a_pattern_made_of_a_line(line: str, likes: list[str]) -> None:
    pattern = pattern_from_line(line)
    assert find_pattern_fault(pattern) == ""
    assert all(re.search(pattern, text) for text in (line, *likes))
    assert not re.search(pattern, "step 12 loss 3.4")
