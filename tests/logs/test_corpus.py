"""The labelled logs that may be looked at: what is understood stays understood."""

import pytest

from benchmarks._words_corpus import CORPUS, EVICT, judged, reliability, score
from holdfast.logs import catalog_files
from holdfast.logs.learned_words import load_learned


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_ours_are_understood(every: int) -> None:
    cases = list(judged(CORPUS / "ours", catalog_files.load_failures(), every))
    found = score(cases)
    wrong = [f"{case.name}: {case.found.klass}" for case in cases if not case.right]
    assert found.logs >= 200 and found.classes == 46
    assert found.klass >= 0.95, wrong
    assert min(found.group, found.action, found.first_cause) >= 0.95, wrong
    assert found.evict_precision >= 0.98, [c.name for c in cases if c.found.action == EVICT != c.label.action]


def test_logs_of_the_outside_world_stay_understood() -> None:
    cases = list(judged(CORPUS / "outside", catalog_files.load_failures(), learned=load_learned()))
    found = score(cases)
    wrong = [f"{case.name}: {case.found.klass}" for case in cases if not case.right]
    assert min(found.klass, found.group, found.action) >= 0.95, wrong
    assert found.evict_precision == 1.0, [c.name for c in cases if c.found.action == EVICT != c.label.action]


def test_answers_are_counted_by_tenths_of_their_confidence() -> None:
    cases = list(judged(CORPUS / "ours", catalog_files.load_failures(), 40))
    bins = reliability(cases)
    assert sum(one.count for one in bins) == len(cases)
    assert all(one.below - 0.1 <= one.confidence + 1e-9 <= one.below + 1e-6 for one in bins), bins
    assert all(0 <= one.right <= 1 for one in bins) and [one.below for one in bins] == sorted(b.below for b in bins)
