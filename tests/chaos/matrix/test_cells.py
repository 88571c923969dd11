"""The covering array covers, and every cell can be named."""

import pytest

from holdfast.chaos.fault_catalog import KINDS
from holdfast.chaos.matrix.cells import (
    FAST,
    HOWS,
    QUICK,
    STRIKES,
    WHENS,
    MatrixCell,
    all_cells,
    choose_cells,
    covering_cells,
    uncovered_pairs,
)
from holdfast.chaos.matrix.expectations import closest_row, load_rows
from holdfast.chaos.matrix.faults_page import cells_without_rows
from holdfast.chaos.scenario import fault_mistake


def test_every_pair_is_covered() -> None:
    assert uncovered_pairs(covering_cells()) == set()
    assert len(covering_cells()) < len(all_cells()) / 2
    assert uncovered_pairs(covering_cells()[1:]), "none of them is there for nothing"


def test_every_fault_is_played_but_for_those_that_are_others_kin() -> None:
    assert {strike.fault.kind for strike in STRIKES} == set(KINDS)
    assert all(fault_mistake(strike.fault) == "" for strike in STRIKES)
    assert all(set(strike.whens) <= set(WHENS) for strike in STRIKES)
    assert all(bool(strike.kept) == (strike.whens != WHENS) for strike in STRIKES), "what is left out says why"


def test_cells_are_chosen_by_name() -> None:
    assert choose_cells(["rank.kill/ddp/idle"]) == [MatrixCell("rank.kill", "ddp", "idle")]
    assert len(choose_cells(["rank.kill"])) == len(HOWS) * len(WHENS)
    assert choose_cells(["fast"]) == list(FAST) and set(FAST) <= set(all_cells())
    assert choose_cells(["quick"]) == list(QUICK) and set(QUICK) <= set(all_cells())
    assert choose_cells(["all"]) == all_cells()
    with pytest.raises(ValueError, match=r"'rank\.vex'"):
        choose_cells(["rank.vex"])


def test_something_is_expected_of_every_cell() -> None:
    rows = load_rows()
    assert cells_without_rows(rows) == []
    assert all(row.why for row in rows if row.oracle != "exact"), "what cannot be seen says why"
    assert all(row.oracle == "blind" for row in rows if row.faint)
    assert {row.strike for row in rows} == {strike.name for strike in STRIKES}
    assert closest_row(rows, MatrixCell("bits.weights.mantissa", "fsdp", "idle")).oracle == "blind"
    assert closest_row(rows, MatrixCell("bits.weights.mantissa", "ddp", "idle")).verdict == "evict"
