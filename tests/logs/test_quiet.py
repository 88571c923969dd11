"""What jobs that are well write every day: no row may take it for a failure."""

from pathlib import Path

import pytest

from holdfast.core.log_analysis.catalog_hits import find_hits
from holdfast.core.log_analysis.line_prefixes import parse_lines
from holdfast.logs import catalog_files

CATALOG = catalog_files.load_failures()
QUIET = Path(__file__).with_name("quiet.txt").read_text(encoding="utf-8").splitlines()
ENDS = 4.0  # weight of what may end a job: a warning of less has nothing to say against an exception


@pytest.mark.parametrize("line", QUIET)
def test_it_ends_no_job(line: str) -> None:
    hits = [hit for hit in find_hits(parse_lines([(0, line)], 0), CATALOG) if hit.row.role in ("cause", "echo")]
    assert not [(hit.klass, hit.weight) for hit in hits if hit.weight >= ENDS]


@pytest.mark.parametrize(
    ("line", "klass"),
    [
        ("ValueError: cannot convert float NaN to integer", "python_exception"),
        ("ValueError: rowLabels cannot be used alongside Pandas DataFrame", "python_exception"),
        ("AssertionError: expecting value weights shape of 7, but got 9", "python_exception"),
        ("ValueError: einsum: Index 7 has mismatched sizes 7 and 9.", "python_exception"),
        ("ValueError: KL-divergence between two normals with different event shapes", "python_exception"),
    ],
)
def test_words_inside_of_other_words(line: str, klass: str) -> None:
    """Found among the messages of Python's and PyTorch's own sources."""
    text = ["Traceback (most recent call last):", '  File "/w/t.py", line 3, in f', "    g()", line]
    hits = [hit for hit in find_hits(parse_lines(list(enumerate(text)), 0), CATALOG) if hit.row.role == "cause"]
    assert [hit.klass for hit in hits] == [klass]
