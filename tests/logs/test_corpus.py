"""The labelled logs that may be looked at: what is understood stays understood."""

import pytest

from benchmarks._words_corpus import CORPUS, EVICT, judged, score
from holdfast.logs import catalog_files


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_ours_are_understood(every: int) -> None:
    cases = list(judged(CORPUS / "ours", catalog_files.load_failures(), every))
    found = score(cases)
    wrong = [f"{case.name}: {case.found.klass}" for case in cases if not case.right]
    assert found.logs >= 200 and found.classes == 46
    assert found.klass >= 0.95, wrong
    assert min(found.group, found.action, found.first_cause) >= 0.95, wrong
    assert found.evict_precision >= 0.98, [c.name for c in cases if c.found.action == EVICT != c.label.action]
