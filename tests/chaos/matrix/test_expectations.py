"""Whatever is not as expected is named."""

import msgspec
import pytest

from holdfast.chaos.matrix import expectations
from holdfast.chaos.matrix.cells import MatrixCell
from holdfast.chaos.matrix.expectations import CellOutcome, ExpectedRow, closest_row, find_deviations, judging_row

ROW = ExpectedRow(strike="node.kill", oracle="exact", verdict="evict", evicted=1, restarts=1, lost=5, alarm="silence")
CAME = CellOutcome(
    verdict="evict", evicted=("n1",), guilty=("n1",), restarts=1, lost=2, alarms=("crash", "silence"), compared=40
)


def test_as_expected() -> None:
    assert find_deviations(ROW, CAME) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"verdict": "restart"}, "'restart'"),
        ({"evicted": ()}, "0 nodes"),
        ({"evicted": ("n2",)}, "n2"),
        ({"restarts": 2}, "2 restarts, not 1"),
        ({"lost": 6}, "6 steps"),
        ({"alarms": ("crash",)}, "silence"),
        ({"differing": 3}, "3 of 40"),
        ({"compared": 0}, expectations.NOT_COMPARED),
        ({"back": False}, expectations.NOT_BACK),
        ({"stored": False}, expectations.NOT_STORED),
        ({"skipped": "no root"}, "skipped: no root"),
        ({"unseen": ("node.kill",)}, "node.kill"),
        ({"misnamed": ("node.kill",)}, "node.kill"),
    ],
)
def test_what_is_not(change: dict[str, object], words: str) -> None:
    found = find_deviations(ROW, msgspec.structs.replace(CAME, **change))
    assert any(words in sentence for sentence in found), found


def test_what_nobody_can_see_has_spoilt_something() -> None:
    row, came = (
        ExpectedRow(strike="bits", oracle="blind", why="nobody has the same"),
        CellOutcome(differing=3, compared=40),
    )
    assert find_deviations(row, came) == []
    untouched = msgspec.structs.replace(came, differing=0)
    assert find_deviations(row, untouched) == [expectations.NOTHING_DIFFERS]
    assert find_deviations(msgspec.structs.replace(row, faint="it may be rounded away"), untouched) == []
    assert find_deviations(row, CellOutcome()) == [expectations.NOT_COMPARED]


def test_what_cannot_be_done_is_skipped() -> None:
    row = ExpectedRow(strike="clock.jump", oracle="skipped", why="there is none")
    assert find_deviations(row, CellOutcome(skipped="there is none")) == []
    assert find_deviations(row, CellOutcome()) == [expectations.INJECTED]


def test_what_is_expected_may_depend_on_what_saw_it() -> None:
    plain = ExpectedRow(strike="bits", oracle="exact", verdict="evict")
    sharded = ExpectedRow(strike="bits", how="fsdp", oracle="blind", why="nobody has the same")
    lost = ExpectedRow(strike="bits", alone="loss", oracle="exact", verdict="restart")
    rows, ddp, fsdp = [plain, lost, sharded], MatrixCell("bits", "ddp", "idle"), MatrixCell("bits", "fsdp", "idle")
    assert (closest_row(rows, ddp), closest_row(rows, fsdp)) == (plain, sharded)
    assert judging_row(rows, ddp, CellOutcome(acted=("replica",))) == plain
    assert judging_row(rows, ddp, CellOutcome(acted=("loss", "replica"))) == plain
    assert (
        judging_row(rows, ddp, CellOutcome(acted=("loss",)))
        == judging_row(rows, fsdp, CellOutcome(acted=("loss",)))
        == lost
    )
    assert judging_row(rows, fsdp, CellOutcome(alarms=("loss",))) == sharded, "what was only told changes nothing"
