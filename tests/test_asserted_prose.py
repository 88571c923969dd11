"""Tests assert facts: a field, a class, a code, a name or a number, and a whole sentence in one place. Fragments of
sentences, which fail when a sentence is put better and pass when it says something else, only become fewer."""

from collections import Counter
from pathlib import Path

from tests.sources import look

TESTS = Path(__file__).parent

# Of each folder of tests; of those that are not named, none. Lower a number when it has fallen; none is raised.
FRAGMENTS = {
    "agent": 22,
    "benchmarks": 1,
    "chaos": 4,
    "checkpoint": 17,
    "cli": 63,
    "client": 25,
    "dash": 5,
    "examples": 2,
    "kube": 3,
    "linux": 1,
    "public": 1,
    "slurm": 2,
    "trainers": 4,
}


def test_fragments_of_sentences_only_become_fewer() -> None:
    paths = [path.relative_to(TESTS) for path in TESTS.rglob("*.py") if "corpus" not in path.parts]
    found = [(path, line) for path in sorted(paths) for line in look((TESTS / path).read_text()).fragments]
    count = Counter(path.parts[0] for path, _ in found)
    more = {folder for folder in count if count[folder] > FRAGMENTS.get(folder, 0)}
    where = [f"{path}:{line}" for path, line in found if path.parts[0] in more]
    assert not more, f"assert a fact, or the whole sentence where it is made: {where}"


def test_fragments_are_seen() -> None:
    assert look('assert a\nassert "is not there" in a, b').fragments == (2,)
    assert look('assert a and f"{a} is not there" not in b').fragments == (1,)
    assert look('def f():\n with raises(A, match=r"is not there$"): b()').fragments == (2,)
    assert look('assert a == "it is not there"').fragments == (), "a whole sentence"
    assert look('assert "rank 3 " in a and "--resume" in a and "all_reduce 41" in a').fragments == (), "names"
    assert look('with raises(A, match=r"^job 7, .* /run/door "): b()').fragments == ()
