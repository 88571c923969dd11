"""The covering array covers, and every cell can be named."""

import pytest

from holdfast.chaos.catalog import KINDS
from holdfast.chaos.matrix.cells import FAST, HOWS, QUICK, STRIKES, WHENS, Cell, chosen, covering, product, uncovered
from holdfast.chaos.matrix.expected import load, row_of
from holdfast.chaos.matrix.table import complete
from holdfast.chaos.scenario import wrong


def test_every_pair_is_covered() -> None:
    assert uncovered(covering()) == set()
    assert len(covering()) < len(product()) / 2
    assert uncovered(covering()[1:]), "none of them is there for nothing"


def test_every_fault_is_played_but_for_those_that_are_others_kin() -> None:
    assert {strike.fault.kind for strike in STRIKES} == set(KINDS)
    assert all(wrong(strike.fault) == "" for strike in STRIKES)
    assert all(set(strike.whens) <= set(WHENS) for strike in STRIKES)
    assert all(bool(strike.kept) == (strike.whens != WHENS) for strike in STRIKES), "what is left out says why"


def test_cells_are_chosen_by_name() -> None:
    assert chosen(["rank.kill/ddp/idle"]) == [Cell("rank.kill", "ddp", "idle")]
    assert len(chosen(["rank.kill"])) == len(HOWS) * len(WHENS)
    assert chosen(["fast"]) == list(FAST) and set(FAST) <= set(product())
    assert chosen(["quick"]) == list(QUICK) and set(QUICK) <= set(product())
    assert chosen(["all"]) == product()
    with pytest.raises(ValueError, match=r"a name is like rank\.kill/ddp/idle"):
        chosen(["rank.vex"])


def test_something_is_expected_of_every_cell() -> None:
    rows = load()
    assert complete(rows) == []
    assert all(row.why for row in rows if row.oracle != "exact"), "what cannot be seen says why"
    assert all(row.oracle == "blind" for row in rows if row.faint)
    assert {row.strike for row in rows} == {strike.name for strike in STRIKES}
    assert row_of(rows, Cell("bits.weights.mantissa", "fsdp", "idle")).oracle == "blind"
    assert row_of(rows, Cell("bits.weights.mantissa", "ddp", "idle")).verdict == "evict"
