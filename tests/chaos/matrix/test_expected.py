"""Whatever is not as expected is named."""

import msgspec
import pytest

from holdfast.chaos.matrix.expected import Came, Row, wrong

ROW = Row(strike="node.kill", oracle="exact", verdict="evict", evicted=1, restarts=1, lost=5, alarm="silence")
CAME = Came(
    verdict="evict", evicted=("n1",), guilty=("n1",), restarts=1, lost=2, alarms=("crash", "silence"), compared=40
)


def test_as_expected() -> None:
    assert wrong(ROW, CAME) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"verdict": "restart"}, "the verdict is 'restart', not 'evict'"),
        ({"evicted": ()}, "0 nodes were evicted"),
        ({"evicted": ("n2",)}, "n2 was evicted without cause"),
        ({"restarts": 2}, "2 restarts, not 1"),
        ({"lost": 6}, "6 steps were lost, more than 5"),
        ({"alarms": ("crash",)}, "no alarm of kind silence came, but crash"),
        ({"differing": 3}, "3 of 40 states differ"),
        ({"compared": 0}, "no state was compared"),
        ({"back": False}, "the job did not come back"),
        ({"skipped": "no root"}, "skipped: no root"),
    ],
)
def test_what_is_not(change: dict[str, object], words: str) -> None:
    found = wrong(ROW, msgspec.structs.replace(CAME, **change))
    assert any(words in sentence for sentence in found), found


def test_what_cannot_be_done_is_skipped() -> None:
    row = Row(strike="clock.jump", oracle="skipped", why="there is none")
    assert wrong(row, Came(skipped="there is none")) == []
    assert wrong(row, Came()) == ["it was expected that it cannot be injected"]
