"""Short logs as people show them: cut, quoted, of many programs; each with the class that it must be found to be."""

import tomllib
from pathlib import Path

import pytest

from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.logs import catalog_files
from tests.core.words.knowing import said

CATALOG = catalog_files.load_failures()
CASES = tomllib.loads(Path(__file__).with_name("outside_words.toml").read_text())["case"]
OF_CLASS = {klass: [case for case in CASES if case["class"] == klass] for klass in {case["class"] for case in CASES}}


@pytest.mark.parametrize("klass", sorted(OF_CLASS))
def test_words_of_a_class(klass: str) -> None:
    for case in OF_CLASS[klass]:
        found = classify_failure(FailureEvidence(lines=said("\n".join(case["lines"]))), CATALOG)
        assert (found.klass, found.action) == (klass, case.get("action", found.action)), case["lines"]


def test_they_are_many() -> None:
    assert len(CASES) >= 400 and len(OF_CLASS) >= 44
