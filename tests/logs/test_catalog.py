"""Knowledge as data: each row matches its own sample and no other row's."""

import pytest

from holdfast.core.detect.crash import Row
from holdfast.core.triage import ECHOES
from holdfast.logs import catalog

CATALOG = catalog.load()
GROUPS = {"infrastructure", "framework", "script", "data_storage", "external", "preemption", "unknown"}
ACTIONS = {"evict_and_restart", "retry", "rollback_or_fix_code", "fix_config", "wait_external", "run_diagnostics"}


def name(row: Row) -> str:
    return f"{row.klass} {row.code or ''}".strip()


@pytest.mark.parametrize("row", CATALOG.rows, ids=name)
def test_a_row_matches_its_own_sample_and_no_other(row: Row) -> None:
    if row.pattern:
        assert CATALOG.match(row.sample) == [row]
    else:
        assert row.code is not None
        assert CATALOG.match(row.sample) == []
        assert CATALOG.classify(row.code, (row.sample,)) is row


@pytest.mark.parametrize("row", CATALOG.rows, ids=name)
def test_a_row_is_complete(row: Row) -> None:
    assert row.klass and row.sample and row.source
    assert row.group in GROUPS
    assert row.action in ACTIONS
    assert bool(row.pattern) != (row.code is not None)


def test_no_two_rows_speak_for_the_same() -> None:
    keys = [row.pattern or row.code for row in CATALOG.rows]
    assert len(keys) == len(set(keys))


def test_the_echoes_are_known_classes() -> None:
    assert {row.klass for row in CATALOG.rows} >= ECHOES
