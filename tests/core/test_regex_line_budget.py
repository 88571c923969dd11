"""What a pattern may be given: all of a line, less of it, or nothing."""

import re
import time

import pytest

from holdfast.core.log_analysis.regex_line_budget import allowed_chars


@pytest.mark.parametrize(
    "pattern",
    [
        r"loss=(\S+)",
        r"step (\d+): .*tokens/s: ([\d.,]+)",
        r"(?i)iteration +(\d+)/",
        r"error|warning.{0,80}(\d+)",
        r"\bNVRM: Xid \(PCI:(?P<of>[0-9a-fA-F:.]+)\): (?:79|119)\b",
    ],
)
def test_what_people_write_sees_the_whole_line(pattern: str) -> None:
    assert allowed_chars(pattern) == 1000


@pytest.mark.parametrize(
    ("pattern", "chars"),
    [(r"a.*a.*(!)", 600), (r"a.*a.*a.*(!)", 150), (r"(?:b|a.{0,300}a.{0,300}a.{0,300}(!))", 150)],
)
def test_what_shares_a_line_many_ways_sees_less_of_it(pattern: str, chars: int) -> None:
    assert allowed_chars(pattern) == chars
    began = time.process_time()
    assert not re.search(pattern, "a" * chars)
    assert time.process_time() - began < 10.0, "a second or two; it would be minutes for a whole line"


def test_what_nothing_helps() -> None:
    assert allowed_chars(r"a.*a.*a.*a.*(!)") == 0
