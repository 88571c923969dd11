"""What every line that a pattern matches must hold."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.log_analysis.failure_catalog import CatalogRow, FailureCatalog
from holdfast.core.log_analysis.pattern_literals import (
    LineBlock,
    LiteralIndex,
    fold_line,
    required_literals,
    split_alternatives,
)
from tests.core.words.knowing import CATALOG, ROWS


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        (r"CUDA out of memory", ["cuda out of memory"]),
        (r"Xid \([^)]*\): 79\b|fallen off the bus", ["fallen off the bus", "xid ("]),
        (r"(?i)No space (?:left|there) on", [" on", "no space "]),
        (r"loss[ :=]+(?:nan|inf)", ["inf", "nan"]),  # and not "loss", which is in every other line
        (r"(?:ab)?cdef", ["cdef"]),
        (r"(?:abcd)+x?", ["abcd"]),
        (r"^(?P<rank>\d+) failed\b", [" failed"]),
        (r"Errno 28\]", ["errno ]"]),
        (r"\d+|error", []),
        (r"\w+", []),
        (r".*", []),
    ],
)
def test_taken_from_patterns(pattern: str, wanted: list[str]) -> None:
    found = [needle.decode() for needle in required_literals(pattern)]
    assert (found == wanted) if wanted != [" on", "no space "] else set(found) <= set(wanted)


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("abc", ["abc"]),
        ("abc|de(?:f|g)|[|x]y", ["abc", "de(?:f|g)", "[|x]y"]),
        (r"(?i)a\|b|[]|]c|[^]|]d", [r"(?i)a\|b", "(?i)[]|]c", "(?i)[^]|]d"]),
        ("(?x)a # one | two (\n | b", ["(?x)a # one | two (\n ", "(?x) b"]),
    ],
)
def test_branches(pattern: str, wanted: list[str]) -> None:
    assert split_alternatives(pattern) == wanted


def test_a_row_without_any_is_refused() -> None:
    with pytest.raises(ValueError, match="give a needle"):
        FailureCatalog((CatalogRow(klass="gpu_oom", pattern=r"\d+", source="ours"),))
    given_one = CatalogRow(klass="gpu_oom", pattern=r"\d+", source="ours", needle="Xid")
    assert FailureCatalog((given_one,)).match_line("NVRM XID 7") == [given_one]
    assert FailureCatalog((given_one,)).match_line("NVRM 7") == []


MANY = b" ".join(bytes(letters) for letters in product(b"defghijkl", repeat=4))  # 6,561 words
TEXTS = st.text(alphabet="abcxyz_ :/.E", max_size=30)


@given(st.lists(TEXTS, max_size=8), st.lists(TEXTS.filter(lambda t: len(t.strip()) >= 2), min_size=1, max_size=8))
def test_the_index_finds_what_a_search_would(lines: list[str], wanted: list[str]) -> None:
    plains, sought = [fold_line(line) for line in lines], [fold_line(needle) for needle in wanted]
    index = LiteralIndex(sought)
    for _ in range(2):  # the second time from memory
        assert [set(found) for found in index.find_literals(plains)] == [
            {n for n in sought if n in line} for line in plains
        ]


@settings(max_examples=20)
@given(st.lists(TEXTS, max_size=8), st.lists(TEXTS.filter(lambda t: len(t.strip()) >= 2), min_size=1, max_size=8))
def test_the_index_finds_the_same_among_many_words(lines: list[str], wanted: list[str]) -> None:
    plains, sought = [fold_line(line) for line in lines], [fold_line(needle) for needle in wanted]
    found = list(LiteralIndex(sought).find_literals([*plains, MANY]))[:-1]
    assert [set(one) for one in found] == [{n for n in sought if n in line} for line in plains]


@given(st.lists(TEXTS, max_size=8), TEXTS.filter(bool))
def test_lines_searched_all_at_once(lines: list[str], needle: str) -> None:
    plains = [fold_line(line) for line in lines]
    assert list(LineBlock(plains).lines_containing(fold_line(needle))) == [
        n for n, line in enumerate(plains) if fold_line(needle) in line
    ]


def test_every_row_is_promised_its_lines() -> None:
    lines = [
        "x NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",
        "torch.OutOfMemoryError: CUDA out of memory.",
        "all is well",
        "OSError: [Errno 28] No space left on device",
    ]
    found = CATALOG.candidate_rows(lines)
    assert [{known.row.klass for known in found.get(n, ())} for n in range(4)] == [
        {"gpu_lost_bus"},
        {"gpu_oom"},
        set(),
        {"disk_full"},
    ]
    assert CATALOG.match_line("No SPACE left on device") == [], "needles ignore case, patterns do not"
    assert len(ROWS) == len(CATALOG.rows)


def test_a_needle_without_letters_is_refused() -> None:
    """Digits are folded away, so such a needle would be found in every line, or in none that has it."""
    with pytest.raises(ValueError, match="no letters"):
        FailureCatalog((CatalogRow(klass="gpu_oom", source="s", pattern="code 3221225477", needle=("32212",)),))
