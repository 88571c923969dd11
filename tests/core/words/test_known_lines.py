"""Single lines that programs are known to write, and the class of each."""

from pathlib import Path

import pytest

from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.logs import catalog_files
from tests.core.words.knowing import said

CATALOG = catalog_files.load_failures()
LINES = Path(__file__).with_name("known_lines.txt").read_text().splitlines()
OF_CLASS: dict[str, list[str]] = {}
for one in LINES:
    OF_CLASS.setdefault(one.split("|", 1)[0], []).append(one.split("|", 1)[1])


@pytest.mark.parametrize("klass", sorted(OF_CLASS))
def test_a_line_is_enough(klass: str) -> None:
    found = {
        text: classify_failure(FailureEvidence(lines=said(text.replace(" // ", "\n"))), CATALOG).klass
        for text in OF_CLASS[klass]
    }
    assert not {text: other for text, other in found.items() if other != klass}


def test_they_are_many() -> None:
    assert len(LINES) >= 430 and len(OF_CLASS) >= 44
