"""Tests assert facts: a field, a class, a code, a name or a number, and a whole sentence in one place. Fragments of
sentences fail when a sentence is put better and pass when it says something else."""

from pathlib import Path

from tests.sources import look

TESTS = Path(__file__).parent


def test_no_fragments_of_sentences_are_asserted() -> None:
    paths = [path.relative_to(TESTS) for path in TESTS.rglob("*.py") if "corpus" not in path.parts]
    found = [f"{path}:{line}" for path in sorted(paths) for line in look((TESTS / path).read_text()).fragments]
    assert not found, "assert a fact, or the whole sentence where it is made"


def test_fragments_are_seen() -> None:
    assert look('assert a\nassert "is not there" in a, b').fragments == (2,)
    assert look('assert a and f"{a} is not there" not in b').fragments == (1,)
    assert look('def f():\n with raises(A, match=r"is not there$"): b()').fragments == (2,)
    assert look('assert a == "it is not there"').fragments == (), "a whole sentence"
    assert look('assert "rank 3 " in a and "--resume" in a and "all_reduce 41" in a').fragments == (), "names"
    assert look('with raises(A, match=r"^job 7, .* /run/door "): b()').fragments == ()
